import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grail_lightning import ArithmeticTask, HFEngine, Loading, LoRA, Policy, Prompt, Sampling
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from tests.draws import without_ties
from tests.processes import group, on_ranks
from tests.runs import problems
from tests.tolerance import assert_near

TASK = ArithmeticTask()
PROMPTS = [
    Prompt(messages=text, reference="", task=TASK)
    for text in ("Compute 7+5-3+8-2.", "Compute 1+2+3.", "Compute 9-9+9.")
]
METHODS = pytest.mark.parametrize("method", ["compact", "static", "generate"])


def sampled(policy, sampling, seed=2, group_size=8, **options):
    engine = HFEngine(**options)
    engine.update_weights(policy)
    return engine.generate(PROMPTS, group_size, sampling, seed=seed)


@pytest.mark.parametrize(
    ("method", "temperature"), [("compact", 0.6), ("compact", 0.0), ("static", 0.6), ("generate", 0.6)]
)
def test_sampling_and_training_agree_on_the_log_probabilities(method, temperature, arithmetic):
    sampling = Sampling(max_response_length=40, temperature=temperature)
    batch = sampled(arithmetic, sampling, method=method)
    with torch.no_grad():
        trained = arithmetic(arithmetic.layout(batch), temperature=sampling.logprob_temperature)
    assert_near(trained, batch.sampling_logprobs, 200, torch.float32)


@pytest.mark.parametrize(("method", "pad_is_end"), [("compact", False), ("static", True), ("generate", True)])
def test_responses_end_with_an_end_token_or_a_special_stop_string_whatever_pads_them(method, pad_is_end, arithmetic):
    """The second as for a base model whose end token is `<|endoftext|>` and which ends its turns with `<|im_end|>`."""
    sampling, end = Sampling(max_response_length=33), arithmetic.tokenizer.eos_token
    expected = sampled(arithmetic, sampling, method=method)
    for row, length in enumerate(expected.response_lengths.tolist()):
        ids = expected.response_ids[row, :length].tolist()
        assert bool(expected.finished[row]) == (ids[-1] in arithmetic.end_token_ids)
        assert not set(arithmetic.end_token_ids) & set(ids[:-1])
        assert bool(expected.finished[row]) or len(ids) == 33
    assert 0 < expected.finished.sum() < len(expected), "the case must hold both"
    base, found = load_policy("arithmetic"), []
    tokenizer = base.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    for end_token, stop in ((end, ()), (tokenizer.convert_ids_to_tokens(2), (end,))):
        tokenizer.eos_token = end_token
        if pad_is_end:
            tokenizer.pad_token = end_token
        base.model.generation_config.eos_token_id = tokenizer.eos_token_id
        stopped = Sampling(max_response_length=33, stop=stop)
        found.append(sampled(Policy(base.model, tokenizer).eval(), stopped, method=method))
    assert not (expected.response_ids == 2).any(), "the case must be about the stop string alone"
    mask = expected.response_mask
    for same in found:
        for name in ("response_mask", "finished", "sampling_logprobs"):
            assert torch.equal(getattr(same, name), getattr(expected, name)), name
        assert torch.equal(same.response_ids[mask], expected.response_ids[mask])
        assert same.texts == expected.texts


@METHODS
def test_the_seed_decides_and_the_global_random_state_is_untouched(method, arithmetic):
    sampling = Sampling(max_response_length=20)
    before = torch.get_rng_state()
    first = sampled(arithmetic, sampling, method=method)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(first.response_ids, sampled(arithmetic, sampling, method=method).response_ids)
    assert first.texts != sampled(arithmetic, sampling, seed=3, method=method).texts


@METHODS
def test_a_stop_string_ends_a_response_and_stays_in_it(method, arithmetic):
    batch = sampled(arithmetic, Sampling(max_response_length=40, stop=("\n",)), seed=1, group_size=4, method=method)
    assert batch.finished.all()
    assert all(text.count("\n") == 1 and text.endswith("\n") for text in batch.texts)


def test_no_prompt_at_all_is_an_empty_batch(arithmetic):
    """With several ranks one may have no problem left; see below."""
    engine = HFEngine()
    engine.update_weights(arithmetic)
    batch = engine.generate([], 4, Sampling(max_response_length=5), seed=0)
    assert (len(batch), batch.texts) == (0, [])


class Casts(TorchDispatchMode):
    """Counts the numbers that are made half precision."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers += args[0].numel() if "_to_copy" in str(func) and kwargs.get("dtype") == torch.bfloat16 else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "lora"), [("generate", None), ("compact", LoRA(rank=2)), ("static", None)])
def test_autocast_casts_the_weights_once_a_call_and_an_update_does_not_find_those(method, lora):
    """Lightning's autocast keeps nothing: the weights would be cast for every token, frozen ones, too."""
    policy = load_policy("arithmetic", Loading(lora=lora))
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    weights = sum(p.numel() for p in policy.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with Casts() as casts:
            batch = sampled(policy, Sampling(max_response_length=24), group_size=1, method=method)
        assert 0.9 * weights < casts.numbers < 4 * weights  # 24 tokens, and activations.
        again = policy(padded_layout(batch.input_ids, batch.attention_mask, batch.response_mask))
        again.sum().backward()
    assert batch.sampling_logprobs.dtype == torch.float32
    assert_near(again.float(), batch.sampling_logprobs, 8, torch.bfloat16)
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


# The limit and the number of problems of each rank in some calls. The first rank always has the larger limit.
CALLS = [[(20, 2), (9, 2)], [(16, 3), (12, 0)], [(8, 0), (7, 2)]]


def _alone_and_together():
    """What this rank samples in each call, and in how many passes: by itself (None without a problem), and in step."""
    policy, passes = load_policy("arithmetic"), []
    policy.model.register_forward_pre_hook(lambda *_: passes.append(1))

    def sample(method, limit, number):
        passes.clear()
        engine = HFEngine(method=method)
        engine.update_weights(policy)
        batch = engine.generate(problems(number, seed=limit), 2, Sampling(max_response_length=limit), seed=1)
        return batch.response_ids.tolist(), len(passes)

    methods = "compact", "generate", "static"
    mine = [(method, *call[int(os.environ["RANK"])]) for method in methods for call in CALLS]
    alone = [sample(*call) if call[-1] else None for call in mine]
    with group():
        return alone, [sample(*call) for call in mine]


def test_each_rank_draws_what_it_draws_alone_in_equally_many_passes():
    """Ranks that are synchronised may sample with different limits, and with no rows at all, as continuations do.

    With a static cache, which sharded weights do not have, they do not wait for each other.
    """
    reports = on_ranks(_alone_and_together)
    for alone, together in reports:
        assert all(one is None or one[0] == other[0] for one, other in zip(alone, together, strict=True))
    (first, passes), (second, others) = reports
    assert [number for _, number in passes[:6]] == [number for _, number in others[:6]]
    assert first[0][1] > second[0][1], "the case must make one rank wait"
    # Transformers' loop waits for the end of the row that stands in for none.
    assert (passes[1][1], others[2][1]) == (first[1][1], second[2][1])
