"""GRAIL, OAR-G and OAR-P against the golden tensors, and what ours must do beside them."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch

from grail_lightning import Policy
from grail_lightning.core.credit.saliency import block_number
from grail_lightning.core.rollout.batch import AnswerMasks
from grail_lightning.credit import GRAIL, BilevelOptions, OARGradient, OARPerturbation, SaliencyOptions, input_saliency
from tests.conftest import GOLDEN
from tests.core.credit.rollouts import assert_golden, context, row_perturbation
from tests.tolerance import near

LEAVES = ["embeddings", "first", "middle", "last"]
GATES = {"all": "both", "positive": "correct", "negative": "wrong"}


@pytest.mark.parametrize("leaf", LEAVES)
def test_saliency_equals_the_golden_tensors(leaf, golden, golden_policy, golden_batch):
    rows = golden_batch.answer.whole.any(1).nonzero().flatten()
    batch = golden_batch.select(rows)
    for read_at, name in (("predictor", "scores"), ("token", "scores_own_token")):
        found = input_saliency(golden_policy, batch, batch.answer.whole, leaf=leaf, read_at=read_at)
        assert_golden(found, golden[f"grail.{leaf}.{name}"][rows], batch.response_mask)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("leaf", LEAVES)
def test_weights_equal_the_golden_tensors(leaf, gate, golden, golden_policy, golden_batch):
    credit = GRAIL(gate=gate, saliency=SaliencyOptions(leaf=leaf))
    weights = credit(golden_policy, golden_batch, context())
    assert_golden(weights.values, golden[f"grail.{leaf}.{GATES[gate]}.weights"], golden_batch.response_mask)


def test_weights_at_another_temperature_equal_the_golden_tensors(golden, golden_policy, golden_batch):
    weights = GRAIL()(golden_policy, golden_batch, context(temperature=0.6))
    assert_golden(weights.values, golden["grail.embeddings.wrong.temperature0.6.weights"], golden_batch.response_mask)


def test_rows_outside_the_gate_or_without_a_box_or_an_advantage_cost_nothing(golden_policy, golden_batch):
    seen = []
    assert golden_policy.tree_kernel  # It tries that once, with passes of its own.
    hook = golden_policy.decoder.register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state.shape[:2]))
    advantages = golden_batch.advantages.clone()
    advantages[1] = 0  # rows 1, 3, 4, 5 are negative; 4 has no box
    weights = GRAIL()(golden_policy, golden_batch.replace(advantages=advantages), context())
    hook.remove()
    # Rows 3 and 5, each up to the last token of its answer, which predicts nothing.
    ends = [int(golden_batch.answer.whole[row].nonzero().max()) for row in (3, 5)]
    assert sum(rows * columns for rows, columns in seen) == sum(ends) + int(golden_batch.prompt_lengths[[3, 5]].sum())
    assert weights.fallback.tolist() == [False, False, False, False, True, False]
    assert (weights.values[4][golden_batch.response_mask[4]] == 1).all()


@pytest.mark.parametrize("overwrite", ["always", "gated", "never"])
def test_answer_tokens_are_overwritten_where_the_option_says(overwrite, golden_policy, golden_batch):
    weights = GRAIL(answer_overwrite=overwrite)(golden_policy, golden_batch, context()).values
    content = golden_batch.answer.content & ~golden_batch.answer.marker
    outside, inside = 0, 1  # row 0 has a positive advantage, row 1 a negative one
    assert (weights[outside][content[outside]] == (5.0 if overwrite == "always" else 1.0)).all()
    assert ((weights[inside][content[inside]] == 5.0).all()) == (overwrite != "never")


def test_leaves_are_counted_as_published():
    assert [block_number(leaf, 36) for leaf in [*LEAVES, 7, 36]] == [0, 1, 18, 35, 7, 36]
    with pytest.raises(ValueError, match="block number up to 36, but got 37"):
        block_number(37, 36)


GRAIL_REPOSITORY = {"scope": "response", "read_at": "predictor", "product": "noisy"}


def _hidden_without_positions(self, attention_mask, input_ids, *, embeds=None):
    return self.decoder(
        inputs_embeds=self.embed(input_ids) if embeds is None else embeds,
        attention_mask=attention_mask.long(),
        use_cache=False,
    ).last_hidden_state


def test_scores_of_oar_g_equal_the_golden_tensors_end_to_end(golden, golden_policy, golden_batch, monkeypatch):
    """The golden tensors count positions from the padding on. Rotary angles and norms round in float32, and a KL of
    1e-7 shows it: with the same positions we are equal, with ours (padding not counted) within that rounding."""
    rows = golden_batch.answer.whole.any(1).nonzero().flatten()
    # Nothing is trimmed away, so that the golden noise fits as it is.
    names = ("input_ids", "attention_mask", "response_ids", "response_mask")
    masks = {f.name: getattr(golden_batch.answer, f.name)[rows] for f in fields(golden_batch.answer)}
    batch = golden_batch.replace(**{n: getattr(golden_batch, n)[rows] for n in names})
    batch = batch.replace(answer=replace(batch.answer, **masks))
    noise, expected = golden["oar_g.noise"][rows], golden["oar_g.scores"][rows]
    credit = OARGradient(read_at="predictor", product="noisy")
    ours = credit.gradient_scores(golden_policy, batch, noise, context())
    assert_golden(ours, expected, batch.response_mask, 1000)
    monkeypatch.setattr(Policy, "hidden", _hidden_without_positions)
    same = credit.gradient_scores(golden_policy, batch, noise, context())
    assert_golden(same, expected, batch.response_mask)


def test_oar_g_with_golden_noise_gives_the_golden_weights(golden, golden_policy, golden_batch):
    class Given(OARGradient):
        def draw_noise(self, policy, batch, context):
            wide = golden_batch.prompt_width
            pieces = []
            for row in batch.row.tolist():
                ours = golden["oar_g.noise"][row]
                pieces.append(ours[wide - batch.prompt_width : wide + batch.response_mask.shape[1]])
            return torch.stack(pieces)

    credit = Given(**GRAIL_REPOSITORY, bilevel=BilevelOptions(interpolate=False, eps=1e-12))
    weights = credit(golden_policy, golden_batch, context())
    assert_golden(weights.values, golden["oar_g.weights"], golden_batch.response_mask, 4000)
    assert weights.fallback.tolist() == [False, False, False, False, True, False]


@pytest.fixture(scope="module")
def exact_batch(golden_batch):
    """The golden rows with the exact span of their last box."""
    whole = torch.zeros_like(golden_batch.response_mask)
    for row, boxes in json.loads((GOLDEN / "spans.json").read_text()).items():
        if boxes:
            whole[int(row), boxes[-1]["tokens"]] = True
    none = torch.zeros_like(whole)
    return golden_batch.replace(answer=AnswerMasks(whole=whole, content=none, marker=none, after=none))


def test_scores_and_weights_of_oar_p_equal_the_golden_tensors(golden, golden_policy, exact_batch):
    assert golden_policy.supports_kv_continuation
    weights = OARPerturbation()(golden_policy, exact_batch, context(budget=2000))
    mask = exact_batch.response_mask
    boxed = exact_batch.answer.whole.any(1)
    assert_golden(weights.scores[boxed], golden["oar_p.answer_mean.scores"][boxed], mask[boxed], 16)
    assert_golden(weights.values, golden["oar_p.answer_mean.weights"], mask)
    assert weights.fallback.tolist() == [False, False, False, False, True, False]


@pytest.mark.parametrize(("distribution", "share"), [("answer_mean", False), ("last", False), ("answer_joint", True)])
def test_each_score_of_oar_p_equals_that_of_a_separate_forward_pass(
    distribution, share, golden_policy, exact_batch, monkeypatch
):
    monkeypatch.setitem(vars(golden_policy), "supports_kv_continuation", share)
    two = torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0])
    weights = OARPerturbation(distribution)(golden_policy, exact_batch.replace(advantages=two), context())
    found = weights.scores
    for row in (1, 2):
        first = exact_batch.answer.whole[row].nonzero()[0].item()
        for token in (0, 7, first - 1):
            by_hand = row_perturbation(golden_policy, exact_batch, row, token, distribution)
            assert found[row, token].item() == near(by_hand, 1000, torch.float32, scale=1e-5)
        assert (found[row, first:] == 0).all()
    assert (found[[0, 3, 4, 5]] == 0).all()
    if distribution == "answer_joint":  # A negative score has the weight of no change.
        row = int((found < 0).sum(1).argmax())
        assert (found[row] < 0).sum() > 1
        assert weights.values[row][found[row] < 0].unique().numel() == 1


@pytest.mark.parametrize("share", [True, False])
def test_only_rows_with_a_box_and_an_advantage_run_and_no_pass_exceeds_the_budget(
    share, golden_policy, exact_batch, monkeypatch
):
    monkeypatch.setitem(vars(golden_policy), "supports_kv_continuation", share)
    advantages = torch.zeros(6)
    advantages[[1, 4]] = -1.0  # row 4 has no box
    shapes = []
    hook = golden_policy.decoder.register_forward_hook(lambda _m, _i, out: shapes.append(out.last_hidden_state.shape))
    credit = OARPerturbation()
    weights = credit(golden_policy, exact_batch.replace(advantages=advantages), context(budget=700))
    hook.remove()
    answer = exact_batch.answer.whole[1].nonzero().flatten().tolist()
    prompt = int(exact_batch.prompt_lengths[1])
    whole = prompt + answer[-1] + 1  # cut off behind the answer
    each = 700 // whole
    starts = [prompt + first for first in range(0, answer[0], each)] if share else [0] * math.ceil(answer[0] / each)
    assert [shape[1] for shape in shapes] == [whole, *(whole - start for start in starts)]
    assert sum(shape[0] for shape in shapes) == 1 + answer[0], "the clean row, and one for each reasoning token"
    assert max(shape[0] for shape in shapes) == each
    others = [0, 2, 3, 4, 5]
    assert torch.equal(weights.values[others], exact_batch.response_mask[others].to(weights.values))
