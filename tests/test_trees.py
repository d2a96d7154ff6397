"""Rows that begin alike, run as prefix trees: prompts, and what responses have in common."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DogeConfig,
    Gemma3TextConfig,
    Lfm2Config,
    MiniMaxConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from grail_lightning.batch import AnswerMasks, SampledBatch, lengths_to_mask
from grail_lightning.credit import GRAIL
from grail_lightning.policy import Loading, LoRA, load_policy, load_tokenizer, micro_batch
from grail_lightning.policy.capabilities import within_attention_window
from grail_lightning.policy.micro_batch import cut_into_trees, cut_rows
from grail_lightning.policy.trees import tree_layout
from grail_lightning.step.fused import SaliencyForward
from tests import batches
from tests.architectures import ARCHITECTURES, SIZES, tiny
from tests.steps import FEWER, gap, steps, update_of

APART = ("gemma2",)
"""Run with eager attention, and so every row apart."""


def rollouts(prompts, responses):
    """Lists of ids as a batch: a prompt for each group, and the responses of each."""
    rows = [(prompt, answer) for prompt, group in zip(prompts, responses, strict=True) for answer in group]
    width, length = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    ids = [[0] * (width - len(p)) + p + r + [0] * (length - len(r)) for p, r in rows]
    lengths = torch.tensor([len(r) for _, r in rows])
    mask = lengths_to_mask(lengths, length)
    begun = torch.arange(width) >= width - torch.tensor([len(p) for p, _ in rows])[:, None]
    sampled = SampledBatch(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        attention_mask=torch.cat([begun, mask], 1),
        response_ids=torch.tensor(ids, dtype=torch.int32)[:, width:],
        response_mask=mask,
        group=torch.arange(len(prompts)).repeat_interleave(torch.tensor([len(group) for group in responses])),
        row=torch.arange(len(rows)),
        finished=torch.ones(len(rows), dtype=torch.bool),
        prompts=[None] * len(rows),
        texts=[""] * len(rows),
    )
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(1))
    return batches.rollouts(sampled, advantages=advantages)


def cut(batch, budget, share_responses=True):
    """All rows as micro-batches of trees."""
    options = {"prompt_width": batch.prompt_width, "share_responses": share_responses}
    return cut_into_trees(batch.input_ids, batch.attention_mask, batch.group, budget, **options)


def laid_out(batch, trees, share_responses=True):
    """The layout of a micro-batch, and its rows."""
    piece = batch.select(trees.rows)
    tensors = piece.input_ids, piece.attention_mask, piece.response_mask
    return tree_layout(*tensors, trees.starts, share_responses=share_responses), piece


@pytest.fixture(scope="module")
def batch():
    """Four groups of four: of one trunk, all the same, one the beginning of another, and nothing in common."""
    random = torch.Generator().manual_seed(0)

    def draw(number):
        return torch.randint(3, 448, (number,), generator=random).tolist()

    trunk, same = draw(6), draw(5)
    return rollouts(
        [draw(5), draw(1), draw(9), draw(4)],
        [
            [trunk + draw(2), trunk + draw(3), trunk[:4] + draw(5), trunk[:4]],
            [same] * 4,
            [trunk[:1], trunk[:2], trunk[:3], trunk[:2]],
            [draw(8), draw(1), draw(9), draw(2)],
        ],
    )


@pytest.fixture(scope="module")
def strangers():
    """Four groups of four whose responses have nothing in common; one response is empty."""
    random = torch.Generator().manual_seed(0)
    lengths = (7, 2, 9, 4, 1, 8, 0, 5, 6, 3, 8, 2, 7, 7, 1, 9)

    def draw(number):
        return torch.randint(3, 448, (number,), generator=random).tolist()

    return rollouts([draw(n) for n in (9, 1, 5, 6)], [[draw(n) for n in lengths[k : k + 4]] for k in (0, 4, 8, 12)])


@pytest.fixture(scope="module")
def examples(batch):
    """The groups of `batch` behind worked examples of 20 tokens, which all prompts have in common."""
    worked = list(range(100, 120))
    width, lengths = batch.prompt_width, batch.response_lengths.tolist()
    prompts = [worked + batch.input_ids[4 * k, :width][batch.attention_mask[4 * k, :width]].tolist() for k in range(4)]
    answers = [row[:length] for row, length in zip(batch.response_ids.tolist(), lengths, strict=True)]
    return rollouts(prompts, [answers[4 * k : 4 * k + 4] for k in range(4)])


TOKENS = st.lists(st.integers(3, 5), min_size=1, max_size=6)


def _seen(layout, place):
    """The places that the token at a place attends to, by the units of the layout's attention."""
    units = layout.attention(torch.float32)["units"]
    unit, query = divmod(int(units.output_of[place]), units.queries.shape[1])
    assert int(units.queries[unit, query]) == place
    return units.keys[unit][units.mask[unit, 0, query] == 0]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_response_token_is_predicted_behind_its_own_row(data):
    groups = data.draw(st.integers(1, 3))
    prompts = data.draw(st.lists(TOKENS, min_size=groups, max_size=groups))
    made = rollouts(prompts, [data.draw(st.lists(TOKENS, min_size=1, max_size=5)) for _ in prompts])
    budget, share_responses = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "MIN_COMMON_TOKENS", data.draw(st.sampled_from([1, 16])))
        parts = cut(made, budget, share_responses)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(len(made)))
    for part in parts:
        layout, piece = laid_out(made, part, share_responses)
        ids = layout.ids[0]
        assert layout.num_tokens == len(ids)
        assert len(ids) <= budget or len(part.rows) == 1
        rows = [
            (ids[mask].tolist(), int(mask.sum() - answer.sum()))
            for ids, mask, answer in zip(piece.input_ids, piece.attention_mask, piece.response_mask, strict=True)
        ]
        expected = [(row[: k + 1], row[k + 1]) for row, prompt in rows for k in range(prompt - 1, len(row) - 1)]
        found = []
        for which in layout.prediction_of.tolist():
            seen = _seen(layout, int(layout.predictors[which]))
            assert layout.positions[0, seen].tolist() == list(range(len(seen)))
            found.append((ids[seen].tolist(), int(layout.targets[which])))
        assert found == expected
        run = layout.places >= 0
        assert torch.equal(ids[layout.places[run]], layout.targets[run])
        flat = [row.tolist() for row in torch.nn.functional.one_hot(layout.prediction_of[layout.source_of])]
        assert flat == torch.nn.functional.one_hot(torch.arange(len(layout.targets))).tolist()


def test_a_common_prefix_is_laid_out_once_and_last_tokens_are_left_out():
    made = rollouts([[7, 8]], [[[3, 4, 5, 9], [3, 4, 6, 9], [3, 4, 6, 9], [4, 9]]])
    (part,) = cut(made, 100)
    layout, _ = laid_out(made, part)
    assert layout.ids.tolist() == [[7, 8, 3, 4, 5, 6, 4]]
    assert layout.num_tokens == 7
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 4, 2]]
    assert len(layout.targets) == 8  # Each token behind the prompt, the ends included.
    assert layout.shares


def test_without_shared_responses_each_predicting_position_belongs_to_one_row_unless_rows_are_equal():
    made = rollouts([[7, 8]], [[[3, 4, 5, 9], [3, 4, 6, 9], [3, 4, 6, 9], [4, 9]]])
    (part,) = cut(made, 100, share_responses=False)
    layout, _ = laid_out(made, part, share_responses=False)
    assert layout.ids.tolist() == [[7, 8, 3, 4, 5, 8, 3, 4, 6, 8, 4]]
    assert len(layout.targets) == 4 + 4 + 2
    assert len(layout.predictors.unique()) == len(layout.predictors)


def test_copies_of_keys_and_values_count_towards_the_budget():
    """A prompt of 8 tokens: behind the first row of 10, five rows of 2 share a unit with its 8 // 4 copies."""
    made = rollouts([[1, 2, 3, 4, 5, 6, 7, 8]], [[[k, 20, 21] for k in range(9, 16)]])
    first, unit = 10, 5 * 2 + 2
    assert [len(part.rows) for part in cut(made, first + unit + 2 + 2)] == [7]
    assert [len(part.rows) for part in cut(made, first + unit + 2 + 2 - 1)] == [6, 1]
    assert [len(part.rows) for part in cut(made, first + unit - 1)] == [5, 2]


@pytest.mark.parametrize(
    ("alike", "budget"), [("responses", 1000), ("responses", 40), ("prompts", 40), ("prompts", 12)]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_whole_rows(name, budget, alike, batch, strangers, tmp_path):
    changes = {"sliding_window": 64} if "sliding_window" in ARCHITECTURES[name][1] else {}
    policy = tiny(name, tmp_path, attention_dropout=0.0, **changes)
    assert policy.supports_prefix_trees == (name not in APART)
    made = batch if alike == "responses" else strangers
    apart, whole = steps(policy, made, False, token_budget=budget)
    shared, fewer = steps(policy, made, True, token_budget=budget)
    assert (fewer < whole) == (name not in APART)
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= (1e-3 if name == "gemma2" else 1e-5)  # Norms run in float32, Gemma 2 altogether.
        assert metrics | FEWER == pytest.approx(expected | FEWER, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"mini_batches": 2},
        {"kl_coefficient": 0.1},
        {"entropy_coefficient": 0.1},
        {"level": "sequence"},
        {"aggregation": "grpo"},
    ],
    ids=str,
)
def test_every_objective_is_that_of_whole_rows(options, batch):
    policy, reference = (load_policy("arithmetic").double() for _ in range(2))
    for p in reference.parameters():
        p.data *= 1.01
    reference = reference if "kl_coefficient" in options else None
    assert policy.supports_prefix_trees
    apart, whole = steps(policy, batch, False, reference, token_budget=60, **options)
    shared, fewer = steps(policy, batch, True, reference, token_budget=60, **options)
    assert fewer < whole
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= 1e-5
        assert metrics | FEWER == pytest.approx(expected | FEWER, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "loading",
    [Loading(gradient_checkpointing=True), Loading(lora=LoRA(rank=2, target_modules=["o_proj"])), Loading()],
    ids=["checkpointed", "adapters", "plain"],
)
def test_each_token_of_a_tree_is_run_once(loading, batch):
    policy = load_policy("arithmetic", loading).double()
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    assert policy.train().shares_prefixes
    apart, _ = steps(policy, batch, False, token_budget=1000)
    shared, embedded = steps(policy, batch, True, token_budget=1000)
    # Two passes; trees of 5 + 6 + 1 + 2 + 4, 1 + 4, 9 + 2 and 4 + 7 + 8 + 1 tokens.
    assert embedded == 2 * (18 + 5 + 11 + 20)
    asked = 4 * (5 + 1 + 9 + 4) + (8 + 9 + 9 + 4) + 4 * 5 + (1 + 2 + 3 + 2) + (8 + 1 + 9 + 2) - 16
    assert shared[0][1]["shared_tokens"] == pytest.approx(1 - (18 + 5 + 11 + 20) / asked)
    assert apart[0][1]["shared_tokens"] == 0
    assert max(gap(ours, theirs) for (ours, _), (theirs, _) in zip(shared, apart, strict=True)) <= 1e-5


@pytest.mark.parametrize("budget", [1000, 60])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_worked_examples_before_all_prompts_are_run_once(name, budget, examples, batch, tmp_path):
    policy = tiny(name, tmp_path, attention_dropout=0.0)
    apart, whole = steps(policy, examples, False, token_budget=budget)
    shared, embedded = steps(policy, examples, True, token_budget=budget)
    _, alone = steps(policy, batch, True, token_budget=1000)
    assert embedded == alone + 2 * 20 if budget == 1000 else embedded < whole / 2
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= 1e-5
        assert metrics | FEWER == pytest.approx(expected | FEWER, rel=1e-3, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_by_flex_attention_are_those_of_sdpa(dtype, batch):
    exact, *_ = steps(load_policy("arithmetic").double(), batch, False, token_budget=1000)
    gaps = {}
    on_gpu = batch.to(torch.device("cuda"))
    for kernel in ("flex", "sdpa"):
        policy = load_policy("arithmetic").to("cuda", dtype)
        policy.tree_kernel = kernel
        (found, _), *_ = steps(policy, on_gpu, True, token_budget=1000)[0]
        gaps[kernel] = gap({name: g.double().cpu() for name, g in found.items()}, exact[0][0])
    assert gaps["flex"] <= 1.5 * gaps["sdpa"] + 1e-6


@pytest.mark.parametrize(("alike", "budget"), [("prompt", 1000), ("beginning", 60), ("beginning", 100_000)])
def test_gradients_of_many_rows_add_up_in_full_precision(alike, budget, strangers):
    """In bfloat16 a running sum over the rows that go on behind a token would lose what the later ones bring."""
    if alike == "prompt":
        # Several prompts, so that the rounding of one backward pass averages out as it does over rows.
        prompts = torch.randint(3, 448, (16, 3), generator=torch.Generator().manual_seed(0)).tolist()
        many = rollouts(prompts, [[[token] for token in range(3, 259)]] * 16)
    else:
        many = strangers.select(torch.arange(4).repeat(64)).replace(row=torch.arange(256))
    many = many.replace(advantages=torch.ones(len(many)))
    (exact, _), *_ = steps(load_policy("arithmetic").double(), many, False, token_budget=budget)[0]
    gaps = {}
    for share in (False, True):
        policy = load_policy("arithmetic", Loading(dtype="bfloat16"))
        assert policy.train().shares_prefixes
        (found, _), *_ = steps(policy, many, share, token_budget=budget)[0]
        gaps[share] = gap({name: g.double() for name, g in found.items()}, exact)
    assert gaps[True] <= 1.2 * gaps[False]


@pytest.mark.parametrize("prompts", ["batch", "examples"])
@pytest.mark.parametrize("budget", [1000, 40])
def test_saliency_keeps_rows_apart(budget, prompts, request):
    """A token of several rows has a saliency for each of them: rows that need one share prompts, others responses."""
    batch = request.getfixturevalue(prompts)
    mask = batch.response_mask
    empty = torch.zeros_like(mask)
    # All groups but the third have an answer in their last token; in the second all rows are the same.
    last = (mask.cumsum(1) == batch.response_lengths[:, None]) & mask & (batch.group != 2)[:, None]
    advantages = batch.advantages.clone()
    advantages[4:8] = -0.5
    answer = AnswerMasks(whole=last, content=last, marker=empty, after=empty)
    located = batches.rollouts(batch, (advantages > 0).float(), advantages, answer=answer)
    policy = load_policy("arithmetic").double().train()
    forward = update_of(policy, located, credit=GRAIL()).forward
    assert isinstance(forward, SaliencyForward)
    assert forward.pending[4:8].all()
    assert 4 < forward.pending.sum() < 16
    found = {share: steps(policy, located, share, credit=GRAIL(), token_budget=budget) for share in (False, True)}
    (apart, whole, expected), (shared, fewer, weights) = found[False], found[True]
    torch.testing.assert_close(weights.values, expected.values, rtol=1e-4, atol=1e-6)
    assert fewer < whole
    assert len(weights.values.unique(dim=0)) == len(expected.values.unique(dim=0)) > 4
    for (ours, metrics), (theirs, wanted) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= 1e-4
        assert metrics | FEWER == pytest.approx(wanted | FEWER, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # A convolution, or a recurrent state, goes through the tokens of a tree as if they were a row.
        (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2}),
        (MiniMaxConfig, {"layer_types": ["linear_attention", "full_attention"] * 2}),
        (Qwen3NextConfig, {"layer_types": ["linear_attention", "full_attention"] * 2}),
    ],
)
def test_models_that_pass_more_than_attention_from_token_to_token_train_on_whole_rows(kind, changes, batch, tmp_path):
    tokenizer = load_tokenizer("arithmetic")
    small = SIZES | {"attention_dropout": 0.0, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    small |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "moe_intermediate_size": 16}
    kind(**small | {"pad_token_id": tokenizer.pad_token_id} | changes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), Loading(from_scratch=True))
    assert not policy.supports_prefix_trees
    assert not policy.supports_kv_continuation
    (apart, whole), (shared, embedded) = (steps(policy, batch, share, token_budget=60) for share in (False, True))
    assert embedded == whole
    for (ours, _), (theirs, _) in zip(shared, apart, strict=True):
        assert all(gradient.isfinite().all() for gradient in ours.values())
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _saved(config, folder, **loading):
    """A policy of a config with random weights."""
    tokenizer = load_tokenizer("arithmetic")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_policy(str(folder), Loading(from_scratch=True, **loading))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [False, True])
def test_a_deviation_that_starts_at_zero_is_found(biases, dtype, batch, tmp_path):
    """Doge adds a mask to its scores that is the same for all keys as long as its parameter A is 0, as it begins."""
    policy = _saved(
        DogeConfig(**SIZES | {"attention_dropout": 0.0, "pad_token_id": 0, "attention_bias": biases}), tmp_path
    )
    masks = {name: p for name, p in policy.named_parameters() if name.endswith(".A")}
    assert len(masks) == 4
    assert not any(p.any() for p in masks.values())
    policy.to(dtype)
    assert not policy.supports_prefix_trees
    steps(policy, batch, True, token_budget=1000, updates_per_batch=1)
    found = {name: p.grad for name, p in masks.items()}
    assert all(gradient.any() for gradient in found.values())


KINDS = {
    "qwen2": (Qwen2Config, {}),  # Biases that begin at zero; those of the keys have hardly a gradient.
    "gemma3": (Gemma3TextConfig, {"layer_types": ["full_attention"] * 4}),  # Norms that begin at zero.
    "olmo": (OlmoConfig, {}),  # Norms without weights.
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}


@pytest.mark.parametrize(
    ("name", "lora", "dtype"),
    [
        ("qwen2", None, torch.float32),
        ("gemma3", None, torch.bfloat16),
        ("olmo", LoRA(rank=2, target_modules=["q_proj", "o_proj"]), torch.float16),
        ("qwen3_moe", LoRA(rank=2, target_modules=["q_proj", "o_proj"]), torch.float32),
    ],
)
def test_the_probe_leaves_everything_as_it_was(name, lora, dtype, tmp_path):
    kind, changes = KINDS[name]
    policy = _saved(kind(**SIZES | {"pad_token_id": 0, "initializer_range": 0.02} | changes), tmp_path, lora=lora).to(
        dtype
    )
    policy.train()
    for number, parameter in enumerate(policy.parameters()):
        parameter.grad = torch.full_like(parameter, number) if parameter.requires_grad and number % 2 else None
    torch.manual_seed(5)
    before = {n: (p.detach().clone(), p.requires_grad, p.grad, p.data_ptr()) for n, p in policy.named_parameters()}
    grads = {n: grad.clone() for n, (_, _, grad, _) in before.items() if grad is not None}
    random = torch.get_rng_state()
    with torch.inference_mode():  # As in `validate` and `predict`.
        assert policy.supports_prefix_trees
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
    assert policy.supports_prefix_trees
    assert within_attention_window(policy, 8)
    assert not within_attention_window(policy, 9)
    apart, whole = steps(policy, batch, False, token_budget=60)
    shared, embedded = steps(policy, batch, True, token_budget=60)
    assert embedded == whole
    assert max(gap(ours, theirs) for (ours, _), (theirs, _) in zip(shared, apart, strict=True)) == 0
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
