"""Parity with the published maths, and what ours must not do."""

from functools import partial

import pytest

from grail_lightning.credit import GRAIL, SaliencyOptions, input_saliency
from grail_lightning.credit.saliency import block_number
from tests.credit.rollouts import assert_golden, context

LEAVES = ["embeddings", "first", "middle", "last"]
GATES = {"all": "both", "positive": "correct", "negative": "wrong"}


_context = partial(context, budget=600)


@pytest.mark.parametrize("leaf", LEAVES)
def test_saliency_equals_the_golden_tensors(leaf, golden, golden_policy, golden_batch):
    rows = golden_batch.answer.whole.any(1).nonzero().flatten()
    batch = golden_batch.select(rows)
    for alignment, name in (("predictor", "scores"), ("token", "scores_own_token")):
        found = input_saliency(golden_policy, batch, batch.answer.whole, leaf=leaf, alignment=alignment)
        assert_golden(found, golden[f"grail.{leaf}.{name}"][rows], batch.response_mask)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("leaf", LEAVES)
def test_weights_equal_the_golden_tensors(leaf, gate, golden, golden_policy, golden_batch):
    credit = GRAIL(gate=gate, saliency=SaliencyOptions(leaf=leaf))
    weights = credit(golden_policy, golden_batch, _context())
    assert_golden(weights.values, golden[f"grail.{leaf}.{GATES[gate]}.weights"], golden_batch.response_mask)


def test_weights_at_another_temperature_equal_the_golden_tensors(golden, golden_policy, golden_batch):
    weights = GRAIL()(golden_policy, golden_batch, _context(temperature=0.6))
    assert_golden(weights.values, golden["grail.embeddings.wrong.temperature0.6.weights"], golden_batch.response_mask)


def test_rows_outside_the_gate_or_without_a_box_or_an_advantage_cost_nothing(golden_policy, golden_batch):
    seen = []
    assert golden_policy.tree_kernel  # It tries that once, with passes of its own.
    hook = golden_policy.decoder.register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state.shape[:2]))
    advantages = golden_batch.advantages.clone()
    advantages[1] = 0  # rows 1, 3, 4, 5 are negative; 4 has no box
    weights = GRAIL()(golden_policy, golden_batch.replace(advantages=advantages), _context())
    hook.remove()
    # Rows 3 and 5, each up to the last token of its answer, which predicts nothing.
    ends = [int(golden_batch.answer.whole[row].nonzero().max()) for row in (3, 5)]
    assert sum(rows * columns for rows, columns in seen) == sum(ends) + int(golden_batch.prompt_lengths[[3, 5]].sum())
    assert weights.fallback.tolist() == [False, False, False, False, True, False]
    assert (weights.values[4][golden_batch.response_mask[4]] == 1).all()


@pytest.mark.parametrize("overwrite", ["always", "gated", "never"])
def test_answer_tokens_are_overwritten_where_the_option_says(overwrite, golden_policy, golden_batch):
    weights = GRAIL(answer_overwrite=overwrite)(golden_policy, golden_batch, _context()).values
    content = golden_batch.answer.content & ~golden_batch.answer.marker
    outside, inside = 0, 1  # row 0 has a positive advantage, row 1 a negative one
    assert (weights[outside][content[outside]] == (5.0 if overwrite == "always" else 1.0)).all()
    assert ((weights[inside][content[inside]] == 5.0).all()) == (overwrite != "never")


def test_leaves_are_counted_as_published():
    assert [block_number(leaf, 36) for leaf in [*LEAVES, 7, 36]] == [0, 1, 18, 35, 7, 36]
    with pytest.raises(ValueError, match="block number up to 36, but got 37"):
        block_number(37, 36)
