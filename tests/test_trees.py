"""Rows that begin alike, run as prefix trees: prompts, and what responses have in common.

`varlen_attn` has a kernel on CUDA alone. On a CPU its definition in torch operations takes its place here; layouts are
the same. tests/test_gpu.py runs the kernel.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DeepseekV32Config,
    DogeConfig,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MiniMaxConfig,
    Qwen3MoeConfig,
)

from grail_lightning import Loading, LoRA
from grail_lightning.core.policy import micro_batch
from grail_lightning.core.policy.capabilities import within_attention_window
from grail_lightning.core.policy.layout import gather_rows
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.micro_batch import cut_into_trees, cut_rows
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.policy.trees import tree_layout
from grail_lightning.core.rollout.batch import AnswerMasks
from grail_lightning.core.step.fused import SaliencyForward
from grail_lightning.credit import GRAIL
from tests import batches
from tests.architectures import ARCHITECTURES, SELECTING, SIZES, tiny
from tests.steps import FEWER, gap, steps, update_of


def rollouts(prompts, responses):
    """Lists of ids as a batch: a prompt for each group, and the responses of each."""
    group = torch.arange(len(prompts)).repeat_interleave(torch.tensor([len(group) for group in responses]))
    rows = batches.of_ids([prompts[g] for g in group], [ids for group in responses for ids in group], group=group)
    return batches.rollouts(rows, advantages=torch.randn(len(rows), generator=torch.Generator().manual_seed(1)))


def cut(batch, budget, share_responses=True):
    """All rows as micro-batches of trees."""
    options = {"prompt_width": batch.prompt_width, "share_responses": share_responses}
    return cut_into_trees(batch.input_ids, batch.attention_mask, batch.group, budget, **options)


def laid_out(batch, trees, share_responses=True):
    """The layout of a micro-batch, and its rows."""
    piece = batch.select(trees.rows)
    tensors = piece.input_ids, piece.attention_mask, piece.response_mask
    return tree_layout(*tensors, trees.starts, share_responses=share_responses), piece


def draw(random, number):
    """Some token ids."""
    return torch.randint(3, 448, (number,), generator=random).tolist()


def alike(prompts, longer=1):
    """Four groups of four: of one trunk, all the same, one the beginning of another, and nothing in common.

    All prompts begin with `prompts`; every other length is `longer` times what it says below.
    """
    random = torch.Generator().manual_seed(0)

    def some(number):
        return draw(random, number * longer)

    trunk, same = some(6), some(5)
    cut = [longer, 2 * longer, 3 * longer, 4 * longer]
    return rollouts(
        [prompts + some(number) for number in (5, 1, 9, 4)],
        [
            [trunk + some(2), trunk + some(3), trunk[: cut[3]] + some(5), trunk[: cut[3]]],
            [same] * 4,
            [trunk[: cut[0]], trunk[: cut[1]], trunk[: cut[2]], trunk[: cut[1]]],
            [some(8), some(1), some(9), some(2)],
        ],
    )


def strangers():
    """Four groups of four whose responses have nothing in common; one response is empty."""
    random = torch.Generator().manual_seed(0)
    lengths = (7, 2, 9, 4, 1, 8, 0, 5, 6, 3, 8, 2, 7, 7, 1, 9)
    prompts = [draw(random, n) for n in (9, 1, 5, 6)]
    return rollouts(prompts, [[draw(random, n) for n in lengths[k : k + 4]] for k in (0, 4, 8, 12)])


EXAMPLES = list(range(100, 120))  # Worked examples, with which all prompts begin.
ROWS = {
    "responses": lambda: alike([]),
    "prompts": strangers,
    "examples": lambda: alike(EXAMPLES),
    "several blocks": lambda: alike([], longer=6),
}


@pytest.fixture(scope="module")
def batch():
    return ROWS["responses"]()


@pytest.fixture
def attend_by(monkeypatch):
    """A function that makes a policy attend in trees by a kernel; it returns the calls of one that CPUs do not have."""
    calls = []

    def by_definition(query, key, value, begins, key_begins, longest, longest_path, *, scale, window_size, enable_gqa):
        """`varlen_attn`: queries are the last tokens of a sequence, keys all of it."""
        assert window_size == (-1, 0)
        assert (longest, longest_path) == (begins.diff().max(), key_begins.diff().max())
        calls.append(begins)
        outputs = []
        for (start, stop), (first, last) in zip(pairwise(begins.tolist()), pairwise(key_begins.tolist()), strict=True):
            states = (s[None].transpose(1, 2) for s in (query[start:stop], key[first:last], value[first:last]))
            mask = torch.ones(stop - start, last - first, dtype=torch.bool).tril(last - first - stop + start)
            out = scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def take(policy, kernel):
        if kernel == "varlen":
            monkeypatch.setattr("grail_lightning.core.policy.trees.varlen_attn", by_definition)
        policy.tree_kernel = kernel
        return calls

    return take


TOKENS = st.lists(st.integers(3, 5), min_size=1, max_size=6)


def _seen(layout, place):
    """The places that the token at a place attends to, by the units of the layout's attention."""
    units = layout.attention.arguments(torch.float32)["units"]
    unit, query = divmod(int(units.output_of[place]), units.queries.shape[1])
    assert int(units.queries[unit, query]) == place
    return units.keys[unit][units.mask[unit, 0, query] == 0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_response_token_is_predicted_behind_its_own_row(data):
    groups = data.draw(st.integers(1, 3))
    prompts = data.draw(st.lists(TOKENS, min_size=groups, max_size=groups))
    made = rollouts(prompts, [data.draw(st.lists(TOKENS, min_size=1, max_size=5)) for _ in prompts])
    cells = made.response_mask.numel()
    put_in = data.draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    made = made.replace(response_mask=made.response_mask & ~torch.tensor(put_in).view_as(made.response_mask))
    budget, share_responses = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "MIN_COMMON_TOKENS", data.draw(st.sampled_from([1, 16])))
        parts = cut(made, budget, share_responses)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(len(made)))
    for part in parts:
        layout, piece = laid_out(made, part, share_responses)
        ids = layout.ids[0]
        assert layout.num_tokens == len(ids)
        # Equal rows of which other tokens were sampled are cut as one, but run apart.
        assert len(ids) <= budget or len(part.rows) == 1 or (any(put_in) and not share_responses)
        rows = [
            (ids[mask].tolist(), torch.nn.functional.pad(sampled, (piece.prompt_width, 0))[mask].tolist())
            for ids, mask, sampled in zip(piece.input_ids, piece.attention_mask, piece.response_mask, strict=True)
        ]
        expected = [(row[:k], row[k]) for row, sampled in rows for k in range(len(row)) if sampled[k]]
        found = []
        for which in layout.prediction_of.tolist():
            seen = _seen(layout, int(layout.predictors[which]))
            assert layout.positions[0, seen].tolist() == list(range(len(seen)))
            found.append((ids[seen].tolist(), int(layout.targets[which])))
        assert found == expected
        numbers = layout.to_rows(torch.arange(len(layout.targets)))
        assert torch.equal(numbers[piece.response_mask], layout.prediction_of)
        run = layout.places >= 0
        assert torch.equal(ids[layout.places[run]], layout.targets[run])
        assert torch.equal(layout.prediction_of[layout.source_of], torch.arange(len(layout.targets)))


@pytest.mark.parametrize(
    ("share_responses", "ids", "positions", "predictions"),
    [
        (True, [7, 8, 3, 4, 5, 6, 4], [0, 1, 2, 3, 4, 4, 2], 8),  # Each token behind the prompt, the ends included.
        (False, [7, 8, 3, 4, 5, 8, 3, 4, 6, 8, 4], [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 4 + 4 + 2),  # Equal rows are one.
    ],
)
def test_common_tokens_are_laid_out_once_and_last_tokens_are_left_out(share_responses, ids, positions, predictions):
    made = rollouts([[7, 8]], [[[3, 4, 5, 9], [3, 4, 6, 9], [3, 4, 6, 9], [4, 9]]])
    (part,) = cut(made, 100, share_responses)
    layout, _ = laid_out(made, part, share_responses)
    assert (layout.ids.tolist(), layout.positions.tolist()) == ([ids], [positions])
    assert (layout.num_tokens, len(layout.targets), layout.shares) == (len(ids), predictions, True)
    assert share_responses or len(layout.predictors.unique()) == predictions


def test_copies_of_keys_and_values_count_towards_the_budget():
    """A prompt of 8 tokens: behind the first row of 10, five rows of 2 share a unit with its 8 // 4 copies."""
    made = rollouts([[1, 2, 3, 4, 5, 6, 7, 8]], [[[k, 20, 21] for k in range(9, 16)]])
    first, unit = 10, 5 * 2 + 2
    assert [len(part.rows) for part in cut(made, first + unit + 2 + 2)] == [7]
    assert [len(part.rows) for part in cut(made, first + unit + 2 + 2 - 1)] == [6, 1]
    assert [len(part.rows) for part in cut(made, first + unit - 1)] == [5, 2]


@pytest.mark.parametrize(
    ("name", "rows", "budget", "kernel", "options"),
    [
        ("qwen3", "responses", 1000, "sdpa", {}),
        ("qwen3", "responses", 60, "sdpa", {"mini_batches": 2, "kl_coefficient": 0.1}),
        ("llama", "responses", 40, "sdpa", {"entropy_coefficient": 0.1, "aggregation": "grpo"}),
        ("mistral", "prompts", 40, "sdpa", {"level": "sequence"}),
        ("gemma2", "responses", 40, None, {}),  # It has eager attention, and every row is run separately.
        ("gemma3", "prompts", 12, "sdpa", {}),
        ("llama", "examples", 1000, "sdpa", {}),
        ("qwen3", "responses", 60, "varlen", {}),
        ("gemma3", "several blocks", 4000, "varlen", {}),
    ],
)
def test_gradients_are_those_of_whole_rows(name, rows, budget, kernel, options, attend_by, tmp_path):
    """Qwen3's blocks are checkpointed, and Llama's adapters are trained."""
    changes = {"sliding_window": 512} if "sliding_window" in ARCHITECTURES[name][1] else {}
    lora = LoRA(rank=2, target_modules=["o_proj"]) if name == "llama" else None
    changes |= {"checkpointed": name == "qwen3", "attention_dropout": 0.0, "max_position_embeddings": 512}
    policy = tiny(name, tmp_path, lora, **changes)
    assert policy.tree_kernel == (kernel and "sdpa")
    reference = None
    if "kl_coefficient" in options:
        reference = tiny(name, tmp_path, **changes)
    made = ROWS[rows]()
    apart, whole = steps(policy, made, False, reference, token_budget=budget, **options)
    calls = attend_by(policy, kernel)
    shared, embedded = steps(policy, made, True, reference, token_budget=budget, **options)
    assert bool(calls) == (kernel == "varlen")
    assert (embedded < whole) == (kernel is not None)
    if budget == 1000:  # Two passes; trees of 5 + 6 + 1 + 2 + 4, 1 + 4, 9 + 2 and 4 + 7 + 8 + 1 tokens.
        tokens = 18 + 5 + 11 + 20 + (len(EXAMPLES) if rows == "examples" else 0)
        assert embedded == 2 * tokens
        asked = int(made.lengths.sum()) - 16
        assert shared[0][1]["shared_tokens"] == pytest.approx(1 - tokens / asked)
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= (1e-3 if name == "gemma2" else 1e-5)  # Norms run in float32, Gemma 2 altogether.
        assert (metrics["shared_tokens"] > 0) == (kernel is not None)
        assert metrics | FEWER == pytest.approx(expected | FEWER, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("answer", "argument"), [(1, "units"), (40, "paths")])
def test_short_rows_behind_a_long_prompt_are_joined(answer, argument):
    """`varlen_attn` would copy the keys of the prompt for each row."""
    rows = rollouts([[*range(5, 45)]], [[[k] * answer + [4] for k in range(5, 11)]])
    tensors = rows.input_ids, rows.attention_mask, rows.response_mask
    assert argument in tree_layout(*tensors, [0], kernel="varlen").attention.arguments(torch.float32)


def test_gradients_of_many_rows_behind_one_token_add_up_in_full_precision():
    """In bfloat16 a running sum of ones stays at 256."""
    table = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(table, torch.tensor([0] * 1000 + [2])).sum().backward()
    assert table.grad[:, 0].tolist() == [1000, 0, 1]


@pytest.mark.parametrize(
    ("rows", "budget", "kernel", "checkpointed"), [("examples", 1000, "sdpa", False), ("responses", 60, "varlen", True)]
)
def test_saliency_keeps_rows_apart(rows, budget, kernel, checkpointed, attend_by):
    """A token of several rows has a saliency for each of them: rows that need one share prompts, others responses."""
    batch = ROWS[rows]()
    mask = batch.response_mask
    empty = torch.zeros_like(mask)
    # All groups but the third have an answer in their last token; in the second all rows are the same.
    last = (mask.cumsum(1) == batch.response_lengths[:, None]) & mask & (batch.group != 2)[:, None]
    advantages = batch.advantages.clone()
    advantages[4:8] = -0.5
    answer = AnswerMasks(whole=last, content=last, marker=empty, after=empty)
    located = batches.rollouts(batch, (advantages > 0).float(), advantages, answer=answer)
    policy = load_policy("arithmetic", Loading(gradient_checkpointing=checkpointed)).double().train()
    forward = update_of(policy, located, credit=GRAIL()).forward
    assert isinstance(forward, SaliencyForward)
    assert forward.pending[4:8].all()
    assert 4 < forward.pending.sum() < 16
    apart, whole, expected = steps(policy, located, False, credit=GRAIL(), token_budget=budget)
    calls = attend_by(policy, kernel)
    shared, fewer, weights = steps(policy, located, True, credit=GRAIL(), token_budget=budget)
    assert bool(calls) == (kernel == "varlen")
    assert fewer < whole
    torch.testing.assert_close(weights.values, expected.values, rtol=1e-4, atol=1e-6)
    assert len(weights.values.unique(dim=0)) == len(expected.values.unique(dim=0)) > 4
    for (ours, metrics), (theirs, wanted) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= 1e-4
        assert metrics | FEWER == pytest.approx(wanted | FEWER, rel=1e-3, abs=1e-6)


PLAIN = SIZES | {"attention_dropout": 0.0, "pad_token_id": 0}


def _saved(config, folder, **loading):
    """A policy of a config with random weights."""
    config.save_pretrained(folder)
    load_tokenizer("arithmetic").save_pretrained(folder)
    return load_policy(str(folder), Loading(from_scratch=True, **loading))


MIXING = {
    "a convolution": lambda: Lfm2Config(**PLAIN, layer_types=["conv", "full_attention"] * 2),
    "a state": lambda: MiniMaxConfig(
        **PLAIN, layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1
    ),
    # Doge adds a mask to its scores that is the same for all keys as long as its parameter A is 0, as it begins.
    # As wide as the trial's rows: what it selects has no effect in them.
    "a selection": lambda: DeepseekV32Config(**PLAIN | SELECTING, index_topk=64),
    "a mask": lambda: DogeConfig(**PLAIN),
    "a mask beside biases": lambda: DogeConfig(**PLAIN, attention_bias=True),
}


@pytest.mark.parametrize("what", MIXING)
def test_models_that_pass_more_than_attention_from_token_to_token_train_on_whole_rows(what, tmp_path):
    """Also where that has no effect before the first step; what has no kernel is run whole, as Gemma 2 above."""
    policy = _saved(MIXING[what](), tmp_path).to(torch.bfloat16 if "beside" in what else torch.float32)
    assert not policy.tree_kernel
    assert policy.supports_kv_continuation == what.startswith("a mask")


def test_special_tokens_have_no_part_in_the_trial(tmp_path):
    """Their states may be so large that rounding changes what follows: here they are beyond every number."""
    policy = _saved(LlamaConfig(**PLAIN), tmp_path)
    policy.model.get_input_embeddings().weight.data[:8] = torch.inf
    assert policy.tree_kernel
    assert policy.supports_kv_continuation


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("kind", "changes", "lora", "dtype"),
    [
        (Gemma3TextConfig, {"layer_types": ["full_attention"] * 4}, None, torch.bfloat16),  # Norms that begin at zero.
        (Qwen3MoeConfig, EXPERTS, LoRA(rank=2, target_modules=["q_proj", "o_proj"]), torch.float32),
    ],
)
def test_the_probe_leaves_everything_as_it_was(kind, changes, lora, dtype, tmp_path):
    config = kind(**SIZES | {"pad_token_id": 0, "initializer_range": 0.02} | changes)
    policy = _saved(config, tmp_path, lora=lora).to(dtype).train()
    for number, parameter in enumerate(policy.parameters()):
        parameter.grad = torch.full_like(parameter, number) if parameter.requires_grad and number % 2 else None
    torch.manual_seed(5)
    before = {n: (p.detach().clone(), p.requires_grad, p.grad, p.data_ptr()) for n, p in policy.named_parameters()}
    grads = {n: grad.clone() for n, (_, _, grad, _) in before.items() if grad is not None}
    random = torch.get_rng_state()
    with torch.inference_mode():  # As in `validate` and `predict`.
        assert policy.tree_kernel
    assert torch.equal(torch.get_rng_state(), random)
    for n, parameter in policy.named_parameters():
        weight, trained, grad, place = before[n]
        assert torch.equal(parameter, weight)
        assert (parameter.requires_grad, parameter.data_ptr()) == (trained, place)
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, grads[n])
    assert all(module.training for module in policy.modules())


def test_rows_beyond_a_sliding_window_are_run_whole(batch, tmp_path):
    policy = tiny("mistral", tmp_path, attention_dropout=0.0)
    assert policy.tree_kernel
    assert within_attention_window(policy, 8)
    assert not within_attention_window(policy, 9)
    (_, whole), (_, embedded) = (steps(policy, batch, share, token_budget=60) for share in (False, True))
    assert embedded == whole
    near = batch.select(torch.tensor([4, 5, 6, 7]))  # A prompt of one token, and 5 more.
    assert steps(policy, near, True, token_budget=60)[1] < steps(policy, near, False, token_budget=60)[1]


def test_packed_blocks_and_dropout_keep_rows_apart(batch, tmp_path):
    """Each row has a dropout of its own; in evaluation there is none."""
    packed = load_policy("arithmetic", Loading(packing=True))
    assert not packed.shares_prefixes
    assert all(micro.starts is None for micro in cut_rows(packed, batch, torch.arange(16), 1000))
    policy = tiny("qwen3", tmp_path, attention_dropout=0.1)
    for training in (True, False):
        policy.train(training)
        assert policy.shares_prefixes is not training
        cuts = cut_rows(policy, batch, torch.arange(16), 1000)
        assert all((micro.starts is None) is training for micro in cuts)


def test_rows_with_less_in_common_than_asked_for_are_trees_of_their_own():
    ids = torch.arange(80).reshape(2, 40)
    ids[1, :4] = ids[0, :4]
    rows = ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    for least, starts in ((0.0, [0]), (0.05, [0]), (0.06, [0, 1])):  # They share 4 of 2 · 39 tokens.
        (cut,) = cut_into_trees(*rows, 100, prompt_width=4, least_shared=least)
        assert (cut.rows.tolist(), cut.starts) == ([0, 1], starts)
