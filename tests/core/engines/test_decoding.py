"""The decoding loop from which finished rows leave, against Transformers' own and against the probabilities."""

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import Gemma2Config, GenerationConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config

from grail_lightning import ArithmeticTask, HFEngine, Policy, Prompt, Sampling
from grail_lightning.core.engines.hf.decoding import Decoding
from grail_lightning.core.engines.hf.draw import draw
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.rollout.batch import pad_left
from tests import architectures
from tests.draws import without_ties
from tests.tolerance import assert_near

TASK = ArithmeticTask()
TEXTS = ("Compute 7+5-3+8-2.", "Compute 1+2+3.", "Compute 9-9+9.", "Compute 2+2+2+2+2+2+2+2.")
EXAMPLES = "Compute 1+2.\n1+2=3\nCompute 5-2+3.\n5-2=3\n3+3=6\n"
PROMPTS = [Prompt(messages=text, reference="", task=TASK) for text in TEXTS]
SIZES = architectures.SIZES | {"num_hidden_layers": 3, "max_position_embeddings": 4096, "initializer_range": 0.5}
SIZES |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
MODELS = {
    "qwen3": lambda: Qwen3Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    # A window shorter than the prompts, in every layer and in every other one.
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=6),
}


def policy_of(config, end_bias=None, dtype=torch.float64, token=1):
    """Random weights; `end_bias` makes the end token as likely as a test needs."""
    torch.manual_seed(3)
    if config.model_type == "gemma2":
        dtype = torch.float32  # Its eager attention takes the softmax in float32, where float64's least number is -inf.
    model = Auto.from_config(config).to(dtype)
    if end_bias is not None:
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.zeros(config.vocab_size, dtype=dtype))
        head.bias.data[token] = end_bias
    return Policy(model, load_tokenizer("arithmetic")).eval()


def engine_of(policy, **options):
    engine = HFEngine(**options)
    engine.update_weights(policy)
    return engine


def decode(policy, texts, sampling, order=None):
    """The loop's result and state. `order` is one of the rows, of which a finished one leaves at once."""
    order = torch.arange(len(texts)) if order is None else order
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(len(texts), sampling.max_response_length, dtype=torch.float64, generator=random)[order]
    with torch.no_grad():
        decoding = Decoding(policy, [policy.encode(texts[k]) for k in order], sampling, list(noise))
        return decoding.run(), decoding


@pytest.mark.parametrize("family", MODELS)
def test_greedy_decoding_is_that_of_transformers_with_a_common_beginning_and_without(family):
    policy = policy_of(MODELS[family](), end_bias=4.0)
    for start in ("", EXAMPLES):
        texts = [start + text for text in TEXTS for _ in range(2)]
        with without_ties():
            ours, loop = decode(policy, texts, Sampling(max_response_length=30, temperature=0.0))
        # A window counts padding between beginning and rest as tokens.
        assert (loop.common > 0) == (start == EXAMPLES and family in ("qwen3", "llama"))
        ids, mask = pad_left([policy.encode(text) for text in texts], 0)
        config = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=1, pad_token_id=0)
        theirs = policy.model.generate(input_ids=ids, attention_mask=mask.long(), generation_config=config)
        theirs = theirs[:, ids.shape[1] :]
        assert torch.equal(ours.ids[:, : theirs.shape[1]], theirs)
        assert not ours.ids[:, theirs.shape[1] :].any()


@pytest.mark.parametrize(
    ("family", "temperature"), [("qwen3", 0.0), ("llama", 0.8), ("mistral", 0.0), ("mistral", 0.8), ("gemma2", 0.8)]
)
def test_rows_are_drawn_as_if_they_were_alone(family, temperature):
    """Rows that draw the same tokens are run once, common beginnings as well, and finished rows leave.

    In the mixed order no row has its like for a neighbour: they begin at rows of the cache of their own.
    """
    policy = policy_of(MODELS[family](), end_bias=12.0 if family == "gemma2" else 10.0)
    texts = [EXAMPLES + text for text in TEXTS for _ in range(4)]
    sampling = Sampling(max_response_length=30, temperature=temperature)
    mixed = torch.arange(16).reshape(4, 4).T.flatten()
    run = []
    hook = policy.model.get_input_embeddings().register_forward_hook(lambda _, args, out: run.append(len(args[0])))
    with without_ties():
        together, loop = decode(policy, texts, sampling)
    assert (max(run) == 4) == (temperature == 0)
    assert temperature == 0 or len(loop.rows) < 12, "the case must make rows leave"
    assert len(loop.rows) == (together.lengths == together.lengths.max()).sum(), "each leaves at once"
    hook.remove()
    other, _ = decode(policy, texts, sampling, order=mixed)
    alone = [decode(policy, texts, sampling, order=torch.tensor([k]))[0] for k in range(0, 16, 3)]
    for found, rows in ((other, mixed), *((own, [3 * k]) for k, own in enumerate(alone))):
        assert torch.equal(found.ids, together.ids[rows])
        assert_near(found.logprobs, together.logprobs[rows], 64, torch.float32)  # kept in float32


@pytest.mark.parametrize(("method", "temperature"), [("compact", 1.0), ("compact", 0.6), ("generate", 0.6)])
def test_first_tokens_are_as_frequent_as_they_are_probable(method, temperature):
    r"""χ² over the 448 tokens, those expected fewer than 5 times taken together; also those beyond the likeliest 50."""
    policy = policy_of(Qwen3Config(**(SIZES | {"initializer_range": 0.15})), dtype=torch.float32)
    number = 20_000 if method == "compact" else 5_000  # Enough for what `generate` may get wrong: options.
    sampling = Sampling(max_response_length=1, temperature=temperature)
    batch = engine_of(policy, cache_tokens=10**7, method=method).generate(PROMPTS[:1], number, sampling, seed=11)
    ids = torch.tensor([policy.encode(TEXTS[0])])
    with torch.no_grad():
        expected = (policy.model(ids).logits[0, -1] / temperature).softmax(-1).double() * number
    assert expected.sort(descending=True).values[50:].sum() > 0.1 * number, "truncation to 50 must show"
    observed = torch.bincount(batch.response_ids[:, 0], minlength=448).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    # Mean f, standard deviation √(2f); 4 of these are a chance of about 1 in 10,000 for a fixed seed.
    freedom = len(expected) - 1
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert abs(chi2 - freedom) < 4 * (2 * freedom) ** 0.5


def test_top_k_and_top_p_draw_from_the_tokens_they_keep_alone():
    policy = policy_of(MODELS["qwen3"](), dtype=torch.float32)
    ids = torch.tensor([policy.encode(TEXTS[0])])
    with torch.no_grad():
        probs = policy.model(ids).logits[0, -1].softmax(-1)
    ranked = probs.sort(descending=True)
    nucleus = int((ranked.values.cumsum(0) < 0.6).sum()) + 1
    for sampling, kept in (
        (Sampling(max_response_length=1, top_k=3), 3),
        (Sampling(max_response_length=1, top_p=0.6), nucleus),
    ):
        drawn = engine_of(policy).generate(PROMPTS[:1], 4000, sampling, seed=1).response_ids[:, 0]
        assert set(drawn.tolist()) == set(ranked.indices[:kept].tolist())


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_a_token_is_where_the_cumulative_sum_of_probabilities_passes_the_number(deterministic):
    """Short rows and rows that are summed in blocks, against a search from the left; also summed as on CUDA."""
    random = torch.Generator().manual_seed(0)
    noise = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.99999, 0.999999999], dtype=torch.float64)
    try:
        torch.use_deterministic_algorithms(deterministic)
        for width in (5, 2048, 2049, 7001):
            weights = torch.rand(6, width, dtype=torch.float64, generator=random) ** 8
            weights[:, torch.rand(width, generator=random) < 0.5] = 0
            weights[:, 3] = 1  # The largest, to which `draw` scales the others.
            tokens, logprobs = draw(weights.log(), Sampling(max_response_length=1), [], noise)
            for row, token in enumerate(tokens):
                sums = weights[row].log().exp().cumsum(0)
                assert token == (sums <= noise[row] * sums[-1]).sum()
                assert weights[row, token] > 0
                assert_near(logprobs[row].exp(), weights[row, token] / sums[-1], 100, torch.float64)
        rare = torch.zeros(4000, 5000)
        rare[:, [3, 700, 4990]] = torch.tensor([0.1, 1.0, 1e-3])
        noise = torch.rand(4000, dtype=torch.float64, generator=random)
        noise[:2] = torch.tensor([0.0, 1 - 2**-53])
        tokens, _ = draw(rare.log(), Sampling(max_response_length=1), [], noise)
        assert set(tokens.tolist()) == {3, 700, 4990}, "no token without weight, in float32"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", ["compact", "generate"])
def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(method):
    """``2.`` + ``\n``: the prompt's last character and the response's first would be a stop string together."""
    newline = load_tokenizer("arithmetic")("\n", add_special_tokens=False)["input_ids"][0]
    policy = policy_of(MODELS["qwen3"](), end_bias=1e4, token=newline)
    sampling = Sampling(max_response_length=4, stop=(".\n",))
    batch = engine_of(policy, method=method).generate(PROMPTS[:1], 2, sampling, seed=0)
    assert batch.texts == ["\n\n\n\n"] * 2
    assert not batch.finished.any()


def test_models_with_a_decoding_step_of_their_own_are_left_to_transformers():
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    policy, sampling = policy_of(Phi3Config(**sizes), dtype=torch.float32), Sampling(max_response_length=5)
    with pytest.warns(UserWarning, match=r"`Phi3ForCausalLM` by Transformers' `generate`"):
        engine = engine_of(policy)
    engine.update_weights(policy)  # Each sampling does so. A second warning would be an error here.
    batch = engine.generate(PROMPTS[:1], 2, sampling, seed=0)
    plain = engine_of(policy, method="generate").generate(PROMPTS[:1], 2, sampling, seed=0)
    assert torch.equal(batch.response_ids, plain.response_ids)


def test_weights_that_are_not_numbers_are_an_error():
    policy = policy_of(MODELS["llama"]())
    policy.model.get_output_embeddings().weight.data[7] = float("nan")
    with pytest.raises(ValueError, match=r"logits must be finite .* lower the learning rate"):
        engine_of(policy).generate(PROMPTS, 2, Sampling(max_response_length=3), seed=0)
