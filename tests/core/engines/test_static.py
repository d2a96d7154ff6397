"""The decoding loop in buckets over a static cache, and compiled blocks, against the loop whose cache grows."""

import logging
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import GemmaConfig, GPTNeoXConfig, LlamaConfig, MistralConfig, Olmo2Config, Qwen3Config

from grail_lightning import HFEngine, LoRA, Sampling
from grail_lightning.core.distributed.sharding import gathered, shard
from grail_lightning.core.engines.hf import static
from grail_lightning.core.engines.hf.static import StaticDecoding
from grail_lightning.core.policy.load import load_policy
from tests import architectures
from tests.core.engines.test_decoding import PROMPTS, SIZES, engine_of, policy_of
from tests.draws import without_ties
from tests.processes import group, on_ranks
from tests.tolerance import assert_near

NO_GROUPS = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
FAMILIES = {  # With a bias of the end token and a seed for which rows end one by one, and no draw is near a tie.
    "qwen3": (lambda: Qwen3Config(**SIZES), 8.0, 3),
    "llama": (lambda: LlamaConfig(**SIZES), 8.0, 4),
    "gemma": (lambda: GemmaConfig(**SIZES), 6.0, 2),
    "olmo2": (lambda: Olmo2Config(**SIZES), 7.0, 3),
    "gpt_neox": (lambda: GPTNeoXConfig(**NO_GROUPS), 8.0, 3),
}
SAMPLING = Sampling(max_response_length=24, temperature=0.8)


@pytest.fixture(autouse=True)
def _quiet_compiler(monkeypatch):
    """Pytest keeps all records of all loggers, of which torch's compiler has thousands."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


@pytest.fixture
def buckets(monkeypatch):
    """Makes buckets small; the shapes ``(rows, columns)`` of those that are begun."""
    found, begin = [], StaticDecoding._begin_bucket
    sizes = {"_FEWEST_ROWS": 2, "_GROWTH_COLUMNS": 6, "_COLUMN_MULTIPLE": 4, "_TOKENS_BETWEEN_LOOKS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(static, name, size)

    def begin_and_keep(self, missing):
        tokens = begin(self, missing)
        found.append((len(self.rows), self.mask.shape[-1]))
        return tokens

    monkeypatch.setattr(StaticDecoding, "_begin_bucket", begin_and_keep)
    return found


def sample(policy, sampling=SAMPLING, group_size=3, seed=4, **options):
    return engine_of(policy, **options).generate(PROMPTS, group_size, sampling, seed)


def assert_same(found, expected):
    for name in ("input_ids", "response_mask", "finished"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert_near(found.sampling_logprobs, expected.sampling_logprobs, 64, torch.float32)  # kept in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probabilities_are_those_of_the_loop_whose_cache_grows(family, buckets):
    """Prompts of four lengths; rows end early, and leave by bucket."""
    config, bias, seed = FAMILIES[family]
    policy = policy_of(config(), end_bias=bias)
    with without_ties():
        expected, found = (sample(policy, seed=seed, method=method) for method in ("compact", "static"))
    assert_same(found, expected)
    assert len(set(expected.response_lengths.tolist())) > 4
    buckets.pop(0)  # The trial's.
    rows, columns = ([*dict.fromkeys(sizes)] for sizes in zip(*buckets, strict=True))
    assert rows[0] == 12
    assert len(rows) > 2, "the case must make rows leave"
    assert len(columns) > 2, "and the cache grow"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"stop": ("+", "=1")}])
def test_every_option_of_sampling_means_the_same(sampling, buckets):
    policy = load_policy("arithmetic").eval()
    sampling = Sampling(max_response_length=24, **sampling)
    expected, found = (sample(policy, sampling, method=method) for method in ("compact", "static"))
    assert torch.equal(found.input_ids, expected.input_ids)
    assert torch.equal(found.finished, expected.finished)
    if sampling.stop:
        assert any(text.endswith(sampling.stop) for text in found.texts)
    assert_near(found.sampling_logprobs, expected.sampling_logprobs, 200, torch.float32)


def test_a_row_depends_neither_on_buckets_nor_on_other_rows(monkeypatch):
    policy, seeds = policy_of(LlamaConfig(**SIZES), end_bias=8.0), range(112, 124)
    found = []
    with without_ties():
        for fewest, growth, cache_tokens in ((2, 5, 10**6), (16, 64, 10**6), (4, 9, 300)):
            monkeypatch.setattr(static, "_FEWEST_ROWS", fewest)
            monkeypatch.setattr(static, "_GROWTH_COLUMNS", growth)
            engine = engine_of(policy, method="static", cache_tokens=cache_tokens)
            found.append(engine.generate_seeded(PROMPTS, 3, SAMPLING, seeds))
        alone = engine.generate_seeded(PROMPTS[2:3], 3, SAMPLING, seeds[6:9])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert alone.texts == found[0].texts[6:9]
    assert len(set(found[0].texts)) > 8


def test_adapters_and_a_policy_in_training_mode_with_checkpointed_blocks_sample_the_same(tmp_path, buckets):
    policy = architectures.tiny("qwen3", tmp_path, LoRA(rank=2), checkpointed=True, max_position_embeddings=256)
    policy.train()
    with without_ties():
        expected, found = (sample(policy, method=method) for method in ("compact", "static"))
    assert_same(found, expected)
    assert policy.training
    assert len(buckets) > 2


@pytest.mark.parametrize(("method", "backend", "most"), [("compact", "eager", 6), ("static", "aot_eager", 2)])
def test_blocks_are_compiled_for_all_layers_shapes_and_calls_at_once(method, backend, most, buckets):
    """The cache that grows has code for masks and for none, and for more memory; both have some for single rows."""
    policy = policy_of(Qwen3Config(**SIZES), end_bias=8.0)
    expected = sample(policy, method="compact")
    torch._dynamo.reset()
    counters.clear()
    engine = engine_of(policy, method=method, compile=backend)
    engine.generate(PROMPTS[:2], 3, SAMPLING, seed=0)
    with without_ties():
        found = engine.generate(PROMPTS, 3, SAMPLING, seed=4)
    assert_same(found, expected)
    assert 0 < counters["stats"]["unique_graphs"] <= most
    assert not counters["graph_break"]
    assert not any("forward" in vars(block) for block in policy.blocks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor uses it.
def test_blocks_compiled_to_kernels_sample_the_same(buckets):
    policy = policy_of(Qwen3Config(**SIZES), end_bias=8.0, dtype=torch.float32)
    expected, found = sample(policy, method="compact"), sample(policy, method="static", compile=True)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert_near(found.sampling_logprobs, expected.sampling_logprobs, 500, torch.float32)


def test_a_sliding_window_is_decoded_as_before_and_one_line_says_why():
    policy = policy_of(MistralConfig(**SIZES, sliding_window=6), end_bias=8.0)
    with pytest.warns(UserWarning, match="with a cache that grows, not with a static one: layers of its cache keep a"):
        found = sample(policy, method="static")
    assert torch.equal(found.input_ids, sample(policy, method="compact").input_ids)


def _sharded():
    """The texts of this rank with sharded weights and with whole ones, and what is said."""
    with group() as rank:
        whole, prompts = load_policy("arithmetic").eval(), PROMPTS[: 1 + 2 * rank]
        sharded = shard(load_policy("arithmetic").eval(), init_device_mesh("cpu", (2,)))
        with gathered(sharded), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = engine_of(sharded, method="static").generate(prompts, 2, SAMPLING, seed=1)
        lines = [str(line.message) for line in said if "HFEngine" in str(line.message)]
        return found.texts, engine_of(whole, method="static").generate(prompts, 2, SAMPLING, seed=1).texts, lines


def test_sharded_weights_are_decoded_as_before_and_one_line_says_why():
    (found, expected, lines), (others, theirs, nothing) = on_ranks(_sharded)
    assert (found, others) == (expected, theirs)
    assert [": its weights are sharded. This is no error." in line for line in lines] == [True]
    assert not nothing


class Doubled(torch.nn.Module):
    """A norm with which a compiler goes wrong."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, states):
        return 2 * self.norm(states) if torch.compiler.is_compiling() else self.norm(states)


def test_a_model_that_cannot_be_compiled_is_sampled_as_it_is_and_one_line_says_why():
    policy = policy_of(LlamaConfig(**SIZES), end_bias=8.0)
    expected = sample(policy)
    for block in policy.blocks:
        block.input_layernorm = Doubled(block.input_layernorm)
    with pytest.warns(UserWarning, match="`LlamaForCausalLM` without compiling its blocks: its log-prob"):
        found = sample(policy, compile="eager")
    assert_same(found, expected)


def test_a_model_that_computes_something_else_over_a_static_cache_keeps_the_other():
    """Here: attention that does not look at its mask, and so sees columns that are still empty."""
    policy = policy_of(LlamaConfig(**SIZES), end_bias=8.0)
    for block in policy.blocks:
        block.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)
    expected = sample(policy)
    with pytest.warns(UserWarning, match="its log-probabilities would be others. This is no error"):
        found = sample(policy, method="static")
    assert_same(found, expected)


def _without_mask(module, args, options):
    mask = options["attention_mask"]
    is_static = mask is not None and mask.is_floating_point()
    return args, options | ({"attention_mask": None} if is_static else {})


def test_a_cpu_decodes_by_default_with_the_cache_that_grows_and_without_compiling(monkeypatch):
    monkeypatch.setattr(StaticDecoding, "run", None)
    monkeypatch.setattr(torch, "compile", None)
    policy = load_policy("arithmetic").eval()
    assert torch.equal(sample(policy).input_ids, sample(policy, method="compact").input_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fast"}, "`method` must be one of auto, static, compact, generate, but got 'fast'"),
        ({"compile": "yes"}, "`compile` must be one of auto, inductor, aot_eager, eager, but got 'yes'"),
    ],
)
def test_options_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HFEngine(**options)
