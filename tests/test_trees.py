"""Rows that begin alike, run as prefix trees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Lfm2Config

from grail_lightning.credit import GRAIL, CreditContext
from grail_lightning.credit.shared import share_forward
from grail_lightning.policy import Loading, LoRA, load_policy, load_tokenizer
from grail_lightning.policy.prefix import can_share_prompts
from grail_lightning.policy.trees import PrefixTrees, can_branch, cut_into_trees, first_alike, reaches
from grail_lightning.rollout import AnswerMasks, RolloutBatch, lengths_to_mask
from tests.architectures import ARCHITECTURES, SIZES, tiny
from tests.steps import FEWER, gap, steps
from tests.tolerance import assert_near, near, roundings

FAR = 1e9  # A span at which attention costs nothing.


def rollouts(prompts, responses):
    """Lists of ids as a batch: a prompt for each group, and the responses of each."""
    rows = [(prompt, answer) for prompt, group in zip(prompts, responses, strict=True) for answer in group]
    width, length = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    ids = [[0] * (width - len(p)) + p + r + [0] * (length - len(r)) for p, r in rows]
    lengths = torch.tensor([len(r) for _, r in rows])
    mask = lengths_to_mask(lengths, length)
    begun = torch.arange(width) >= width - torch.tensor([len(p) for p, _ in rows])[:, None]
    return RolloutBatch(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        attention_mask=torch.cat([begun, mask], 1),
        response_ids=torch.tensor(ids, dtype=torch.int32)[:, width:],
        response_mask=mask,
        group=torch.arange(len(prompts)).repeat_interleave(torch.tensor([len(group) for group in responses])),
        row=torch.arange(len(rows)),
        finished=torch.ones(len(rows), dtype=torch.bool),
        prompts=[None] * len(rows),
        texts=[""] * len(rows),
        advantages=torch.randn(len(rows), generator=torch.Generator().manual_seed(1)),
    )


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


TOKENS = st.lists(st.integers(3, 5), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_response_token_is_predicted_behind_its_own_row(data):
    groups = data.draw(st.integers(1, 3))
    prompts = data.draw(st.lists(TOKENS, min_size=groups, max_size=groups))
    made = rollouts(prompts, [data.draw(st.lists(TOKENS, min_size=1, max_size=5)) for _ in prompts])
    budget, span = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1.0, 20.0, FAR]))
    groves, saved = cut_into_trees(made, torch.arange(len(made)), budget, span)
    assert 0 <= saved < 1
    assert sorted(torch.cat([grove.rows for grove in groves]).tolist()) == list(range(len(made)))
    for grove in groves:
        piece = made.select(grove.rows)
        trees = PrefixTrees(piece.input_ids, piece.attention_mask, piece.response_mask, grove.starts)
        assert trees.ids.numel() <= budget or len(trees.ids) == len(grove.rows) == 1
        rows = [
            (ids[mask].tolist(), int(mask.sum() - answer.sum()))
            for ids, mask, answer in zip(piece.input_ids, piece.attention_mask, piece.response_mask, strict=True)
        ]
        expected = [(row[: k + 1], row[k + 1]) for row, prompt in rows for k in range(prompt - 1, len(row) - 1)]
        found = []
        for which in trees.of.tolist():
            tree, place = divmod(int(trees.before[which]), trees.ids.shape[1])
            seen = trees.mask(torch.float32)[tree, 0, place] == 0
            assert trees.positions[tree][seen].tolist() == list(range(int(seen.sum())))
            found.append((trees.ids[tree][seen].tolist(), int(trees.targets[which])))
        assert found == expected


def test_what_several_rows_begin_with_stands_once_and_what_they_end_with_not_at_all():
    made = rollouts([[7, 8]], [[[3, 4, 5, 9], [3, 4, 6, 9], [3, 4, 6, 9], [4, 9]]])
    ((rows, starts, tokens),), saved = cut_into_trees(made, torch.arange(4), 100, FAR)
    trees = PrefixTrees(*(t[rows] for t in (made.input_ids, made.attention_mask, made.response_mask)), starts)
    assert trees.ids.tolist() == [[7, 8, 3, 4, 5, 6, 4]]
    assert tokens == 7
    assert trees.positions.tolist() == [[0, 1, 2, 3, 4, 4, 2]]
    assert len(trees.targets) == 8  # Each token behind the prompt, the ends included.
    assert saved == near(1 - 7 / (5 + 5 + 5 + 3), 16, torch.float32)


def test_rows_that_differ_early_are_not_held_against_each_other():
    """Two of 2 + 50 tokens: one sequence of 101 costs more than two of 51 once attention does."""
    made = rollouts([[7, 8]], [[[3] * 50, [4] * 50]])
    one, _ = cut_into_trees(made, torch.arange(2), 1000, FAR)
    two, saved = cut_into_trees(made, torch.arange(2), 1000, 50.0)
    assert [grove.starts for grove in one] == [[0]]
    assert [grove.starts for grove in two] == [[0, 1]]
    assert saved == 0


@pytest.mark.parametrize("budget", [1000, 40, 12])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_whole_rows(name, budget, batch, tmp_path):
    changes = {"sliding_window": 64} if "sliding_window" in ARCHITECTURES[name][1] else {}
    policy = tiny(name, tmp_path, attention_dropout=0.0, **changes)
    assert can_branch(policy)
    apart, whole = steps(policy, batch, False, token_budget=budget)
    shared, fewer = steps(policy, batch, True, token_budget=budget)
    assert fewer < whole
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        # Norms run in float32, Gemma 2 altogether.
        number = 4000 if name == "gemma2" else 100
        assert gap(ours, theirs) <= roundings(number, torch.float32)
        assert metrics | FEWER == near(expected | FEWER, number, torch.float32, scale=1.0)


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
    assert can_branch(policy)
    apart, whole = steps(policy, batch, False, reference, token_budget=60, **options)
    shared, fewer = steps(policy, batch, True, reference, token_budget=60, **options)
    assert fewer < whole
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= roundings(100, torch.float32)
        assert metrics | FEWER == near(expected | FEWER, 100, torch.float32, scale=1.0)


@pytest.mark.parametrize(
    "loading",
    [Loading(gradient_checkpointing=True), Loading(lora=LoRA(rank=2, target_modules=["o_proj"])), Loading()],
    ids=["checkpointed", "adapters", "plain"],
)
def test_each_token_of_a_tree_is_run_once(loading, batch):
    """Where prompts alone could not be shared (checkpointed blocks), too."""
    policy = load_policy("arithmetic", loading).double()
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    assert can_branch(policy.train())
    assert can_share_prompts(policy) is not loading.gradient_checkpointing
    apart, _ = steps(policy, batch, False, token_budget=1000)
    shared, embedded = steps(policy, batch, True, token_budget=1000)
    # Two passes; trees of 5 + 6 + 1 + 2 + 4, 1 + 4, 9 + 2 and 4 + 7 + 8 + 1 tokens, padded to the longest.
    assert embedded == 2 * 4 * 20
    asked = 4 * (5 + 1 + 9 + 4) + (8 + 9 + 9 + 4) + 4 * 5 + (1 + 2 + 3 + 2) + (8 + 1 + 9 + 2) - 16
    assert shared[0][1]["shared_tokens"] == pytest.approx(1 - (18 + 5 + 11 + 20) / asked)
    assert apart[0][1]["shared_tokens"] == 0
    gaps = [gap(ours, theirs) for (ours, _), (theirs, _) in zip(shared, apart, strict=True)]
    assert max(gaps) <= roundings(100, torch.float32)


def test_gradients_of_many_rows_add_up_in_full_precision():
    """In bfloat16 a running sum over the rows that go on behind a token would lose what the later ones bring."""
    many = rollouts([[5, 6, 7]], [[[token] for token in range(3, 259)]]).replace(advantages=torch.ones(256))
    (exact, _), *_ = steps(load_policy("arithmetic").double(), many, False, passes=1, token_budget=10**6)[0]
    gaps = {}
    for branches in (False, True):
        policy = load_policy("arithmetic", Loading(dtype="bfloat16"))
        assert can_branch(policy.train())
        (found, _), *_ = steps(policy, many, branches, passes=1, token_budget=10)[0]
        gaps[branches] = gap({name: g.double() for name, g in found.items()}, exact)
    assert gaps[True] <= 1.2 * gaps[False]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "autocast"])
def test_one_mask_is_kept_for_all_layers(precision, batch):
    policy = load_policy("arithmetic").to(precision or torch.float32).train()
    rows = batch.input_ids[:4].long(), batch.attention_mask[:4], batch.response_mask[:4]
    trees = PrefixTrees(*rows, [0])
    square, kept = (trees.ids.shape[1],) * 2, set()

    def keep(tensor):
        kept.update({tensor.untyped_storage().data_ptr()} if tensor.shape[-2:] == square else ())
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        found = policy(*rows, trees=trees).logprobs
    found.sum().backward()
    assert len(kept) == 1


def test_saliency_keeps_rows_apart(batch):
    """A token of several rows has a saliency for each of them: rows that need one are run whole, others as trees."""
    mask = batch.response_mask
    empty = torch.zeros_like(mask)
    # All groups but the third have an answer in their last token; in the second all rows are the same.
    advantages = torch.where(batch.group == 1, -0.5, batch.advantages)
    last = torch.arange(mask.shape[1]) == batch.response_lengths[:, None] - 1
    box = last & (batch.group != 2)[:, None]
    located = batch.replace(
        answer=AnswerMasks(whole=box, content=box, marker=empty, after=empty),
        correct=advantages > 0,
        rewards=(advantages > 0).float(),
        advantages=advantages,
    )
    policy = load_policy("arithmetic").double().train()
    context = CreditContext(step=1, generator=torch.Generator(), token_budget=1000)
    found = {}
    for branches in (False, True):
        shared = share_forward(GRAIL(), policy, located, context, torch.ones(16, dtype=torch.bool))
        assert shared is not None
        assert shared.rows[4:8].all()
        assert 4 < shared.rows.sum() < 16
        made, embedded = steps(policy, located, branches, shared=shared, token_budget=1000)
        found[branches] = made, embedded, shared.weights(policy).values
    assert_near(found[True][2], found[False][2], 1000, torch.float32)
    assert found[True][1] < found[False][1]
    assert len(found[True][2].unique(dim=0)) == len(found[False][2].unique(dim=0)) > 4
    for (ours, metrics), (theirs, expected) in zip(found[True][0], found[False][0], strict=True):
        assert gap(ours, theirs) <= roundings(1000, torch.float32)
        assert metrics | FEWER == near(expected | FEWER, 1000, torch.float32, scale=1.0)


def test_rows_that_say_the_same_speak_for_each_other_if_their_advantages_agree():
    made = rollouts([[5], [5]], [[[7, 8], [7], [7, 8], [7, 8]], [[7, 8], [7, 0], [7], [7]]])
    made = made.replace(advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0]))
    assert first_alike(made, torch.arange(8)).tolist() == [0, 1, 0, 3, 4, 5, 6, 6]
    assert first_alike(made, torch.tensor([2, 7])).tolist() == [2, 7]


def test_models_that_do_not_take_a_mask_of_ours_train_on_whole_rows(batch, tmp_path):
    """A convolution goes through the tokens of a tree as if they were a row."""
    tokenizer = load_tokenizer("arithmetic")
    small = SIZES | {"attention_dropout": 0.0, "layer_types": ["conv", "full_attention"] * 2}
    Lfm2Config(**small, pad_token_id=tokenizer.pad_token_id).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), Loading(from_scratch=True))
    assert not can_branch(policy.train())
    (found, _), *_ = steps(policy, batch, True, token_budget=60)[0]
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_rows_beyond_a_sliding_window_are_run_whole(batch, tmp_path):
    policy = tiny("mistral", tmp_path, attention_dropout=0.0)
    assert can_branch(policy.train())  # A prompt of 4 tokens and 5 more are within its window of 8.
    assert reaches(policy, 8)
    assert not reaches(policy, 9)
    policy.continues = False
    apart, whole = steps(policy, batch, False, token_budget=60)
    shared, embedded = steps(policy, batch, True, token_budget=60)
    assert embedded == whole
    assert max(gap(ours, theirs) for (ours, _), (theirs, _) in zip(shared, apart, strict=True)) == 0


def test_packed_blocks_and_dropout_keep_rows_apart(tmp_path):
    assert not can_branch(load_policy("arithmetic", Loading(packing=True)))
    policy = tiny("qwen3", tmp_path, attention_dropout=0.1)
    assert not can_branch(policy.train())
    assert can_branch(policy.eval())
