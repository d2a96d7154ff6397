import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.policy import Loading, LoRA, Policy, load_policy
from grail_lightning.policy.layout import padded_layout
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Prompt
from tests.draws import without_ties
from tests.tolerance import assert_near

TASK = ArithmeticTask()
PROMPTS = [
    Prompt(messages=text, reference="", task=TASK)
    for text in ("Compute 7+5-3+8-2.", "Compute 1+2+3.", "Compute 9-9+9.")
]


@pytest.fixture(params=["compact", "generate"])
def engine(request, arithmetic):
    made = HFEngine(method=request.param)
    made.update_weights(arithmetic)
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_sampling_and_training_agree_on_the_log_probabilities(temperature, engine, arithmetic):
    sampling = Sampling(max_response_length=40, temperature=temperature)
    batch = engine.generate(PROMPTS, 4, sampling, seed=1)
    with torch.no_grad():
        trained = arithmetic(arithmetic.layout(batch), temperature=sampling.logprob_temperature).logprobs
    assert_near(trained, batch.sampling_logprobs, 200, torch.float32)


def test_the_mask_counts_the_end_token_and_finished_says_who_reached_it(engine, arithmetic):
    batch = engine.generate(PROMPTS, 8, Sampling(max_response_length=33), seed=2)
    ends = set(arithmetic.end_token_ids)
    for row in range(len(batch)):
        ids = batch.response_ids[row, : batch.response_lengths[row]].tolist()
        assert bool(batch.finished[row]) == (ids[-1] in ends)
        assert not ends & set(ids[:-1])
        assert bool(batch.finished[row]) or len(ids) == 33
    assert batch.finished.any()
    assert not batch.finished.all(), "the case must hold both"


def test_a_pad_token_that_is_the_end_token_hides_nothing(arithmetic):
    shared = load_policy("arithmetic")
    shared.tokenizer.pad_token = shared.tokenizer.eos_token
    shared = Policy(shared.model, shared.tokenizer).eval()
    engine = HFEngine()
    engine.update_weights(shared)
    batch = engine.generate(PROMPTS, 4, Sampling(max_response_length=40), seed=3)
    plain = HFEngine()
    plain.update_weights(arithmetic)
    expected = plain.generate(PROMPTS, 4, Sampling(max_response_length=40), seed=3)
    assert torch.equal(batch.response_mask, expected.response_mask)
    assert batch.texts == expected.texts


def test_the_seed_decides_and_the_global_random_state_is_untouched(engine):
    sampling = Sampling(max_response_length=20)
    before = torch.get_rng_state()
    first = engine.generate(PROMPTS, 4, sampling, seed=1)
    torch.rand(3)
    assert torch.equal(first.response_ids, engine.generate(PROMPTS, 4, sampling, seed=1).response_ids)
    assert first.texts != engine.generate(PROMPTS, 4, sampling, seed=2).texts
    torch.set_rng_state(before)
    engine.generate(PROMPTS, 4, sampling, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_stop_string_ends_a_response_and_stays_in_it(engine):
    batch = engine.generate(PROMPTS, 4, Sampling(max_response_length=40, stop=("\n",)), seed=1)
    assert batch.finished.all()
    assert all(text.count("\n") == 1 and text.endswith("\n") for text in batch.texts)


@pytest.mark.parametrize("pad_is_end", [False, True], ids=["", "the pad token is the end token"])
@pytest.mark.parametrize("method", ["compact", "generate"])
def test_a_stop_string_that_is_a_special_token_ends_a_response_as_an_end_token_does(method, pad_is_end, arithmetic):
    """As for a base model whose end token is `<|endoftext|>` and which ends its turns with `<|im_end|>`."""
    expected = _generated(arithmetic, method, Sampling(max_response_length=33))
    end = arithmetic.tokenizer.eos_token
    base = load_policy("arithmetic")
    tokenizer = base.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    if pad_is_end:
        tokenizer.pad_token = tokenizer.eos_token
    base.model.generation_config.eos_token_id = tokenizer.eos_token_id
    base = Policy(base.model, tokenizer).eval()
    found = _generated(base, method, Sampling(max_response_length=33, stop=(end,)))
    assert not (expected.response_ids == 2).any(), "the case must be about the stop string alone"
    assert 0 < found.finished.sum() < len(found), "the case must hold both"
    assert found.finished.tolist() == expected.finished.tolist()
    assert torch.equal(found.response_mask, expected.response_mask)
    mask = expected.response_mask
    assert torch.equal(found.response_ids[mask], expected.response_ids[mask])
    assert torch.equal(found.sampling_logprobs, expected.sampling_logprobs)
    assert found.texts == expected.texts


def _generated(policy, method, sampling):
    engine = HFEngine(method=method)
    engine.update_weights(policy)
    return engine.generate(PROMPTS, 8, sampling, seed=2)


def test_a_response_that_cannot_fit_the_model_is_an_error_before_sampling(engine):
    with pytest.raises(
        ValueError, match=r"exceed the model's .* positions. Lower `max_response_length` to at most 40\d\d"
    ):
        engine.generate(PROMPTS, 2, Sampling(max_response_length=1_000_000), seed=0)


def test_no_prompt_at_all_is_an_empty_batch(engine):
    """With several ranks one may have no problem left; in step with the others it decodes one that is thrown away."""
    for synchronised in (False, True):
        engine.synchronised = synchronised
        batch = engine.generate([], 4, Sampling(max_response_length=5), seed=0)
        assert len(batch) == 0
        assert batch.texts == []
    engine.synchronised = None


class Casts(TorchDispatchMode):
    """Counts the numbers that are made half precision."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers += args[0].numel() if "_to_copy" in str(func) and kwargs.get("dtype") == torch.bfloat16 else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["", "adapters"])
@pytest.mark.parametrize("method", ["compact", "generate"])
def test_autocast_casts_the_weights_once_a_call_and_an_update_does_not_find_those(method, lora):
    """Lightning's autocast keeps nothing: the weights would be cast for every token, frozen ones, too."""
    policy = load_policy("arithmetic", Loading(lora=lora))
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    weights = sum(p.numel() for p in policy.parameters())
    engine = HFEngine(method=method)
    engine.update_weights(policy)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with Casts() as casts:
            batch = engine.generate(PROMPTS[:1], 2, Sampling(max_response_length=24), seed=1)
        assert 0.9 * weights < casts.numbers < 4 * weights  # 24 tokens, and activations.
        policy(padded_layout(batch.input_ids, batch.attention_mask, batch.response_mask)).logprobs.sum().backward()
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == trained
    # Adapters begin with a matrix of zeros, behind which the other one has no gradient yet.
    named = dict(policy.named_parameters())
    assert all(named[name].grad.any() for name in trained if "lora_A" not in name)


def test_a_response_of_a_seed_of_its_own_depends_on_no_other_row(arithmetic):
    """Other neighbours, other places, other calls of the loop: the same texts for the same seeds."""
    whole, cut = HFEngine(), HFEngine(cache_tokens=120)
    sampling = Sampling(max_response_length=40)
    for engine in (whole, cut):
        engine.update_weights(arithmetic)
    seeds = [*range(300, 306)]
    with without_ties():
        together = whole.generate_seeded(PROMPTS, 2, sampling, seeds).texts
        assert cut.generate_seeded(PROMPTS, 2, sampling, seeds).texts == together
        apart = [whole.generate_seeded([PROMPTS[k]], 2, sampling, seeds[2 * k : 2 * k + 2]).texts for k in (2, 0, 1)]
    assert together == [*apart[1], *apart[2], *apart[0]]
    assert whole.generate_seeded(PROMPTS, 2, sampling, seeds[::-1]).texts != together
    assert len(set(together)) > 3
