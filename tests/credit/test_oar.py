"""Parity of OAR-G with the golden tensors, which are of the re-implementation in the GRAIL repository."""

from dataclasses import fields, replace

import pytest
import torch

from grail_lightning.credit import BilevelOptions, CreditContext, OARGradient
from grail_lightning.credit.oar import gradient_scores, scoped_tokens
from grail_lightning.functional import bilevel_map
from grail_lightning.policy import Policy
from tests.credit.closeness import golden_error
from tests.tolerance import assert_near, roundings

GRAIL_REPOSITORY = {"scope": "response", "alignment": "predictor", "product": "noisy"}


def _context(seed=0, budget=600):
    return CreditContext(step=0, generator=torch.Generator().manual_seed(seed), token_budget=budget)


def _boxed(batch):
    return batch.answer.whole.any(1).nonzero().flatten()


def _hidden_without_positions(self, attention_mask, *, input_ids=None, embeds=None):
    return self.decoder(
        input_ids=input_ids, inputs_embeds=embeds, attention_mask=attention_mask.long(), use_cache=False
    ).last_hidden_state


def _all_columns(batch, rows):
    """Some rows of the golden batch with nothing trimmed away, so that the golden noise fits as it is."""
    names = ("input_ids", "attention_mask", "response_ids", "response_mask")
    masks = {f.name: getattr(batch.answer, f.name)[rows] for f in fields(batch.answer)}
    return batch.replace(**{n: getattr(batch, n)[rows] for n in names}, answer=replace(batch.answer, **masks))


def test_scores_equal_the_golden_tensors_end_to_end(golden, golden_policy, golden_batch, monkeypatch):
    """The golden tensors count positions from the padding on. Rotary angles and norms round in float32, and a KL of
    1e-7 shows it: with the same positions we are equal, with ours (padding not counted) within that rounding."""
    rows = _boxed(golden_batch)
    batch, noise, expected = (
        _all_columns(golden_batch, rows),
        golden["oar_g.noise"][rows],
        golden["oar_g.scores"][rows],
    )
    ours = gradient_scores(golden_policy, batch, noise, alignment="predictor", product="noisy")
    assert golden_error(ours, expected, batch.response_mask) < roundings(1000, torch.float32)
    monkeypatch.setattr(Policy, "hidden", _hidden_without_positions)
    same = gradient_scores(golden_policy, batch, noise, alignment="predictor", product="noisy")
    assert golden_error(same, expected, batch.response_mask) < roundings(100, torch.float32)


def test_weights_equal_the_golden_tensors_given_the_golden_scores(golden, golden_batch):
    rows = _boxed(golden_batch)
    found = bilevel_map(golden["oar_g.scores"][rows], golden_batch.response_mask[rows], interpolate=False)
    assert golden_error(found, golden["oar_g.weights"][rows], golden_batch.response_mask[rows]) < roundings(
        100, torch.float32
    )


def test_the_class_with_golden_noise_gives_the_golden_weights(golden, golden_policy, golden_batch):
    class Given(OARGradient):
        def draw_noise(self, policy, batch, context):
            wide = golden_batch.prompt_width
            pieces = []
            for row in batch.row.tolist():
                ours = golden["oar_g.noise"][row]
                pieces.append(ours[wide - batch.prompt_width : wide + batch.response_mask.shape[1]])
            return torch.stack(pieces)

    credit = Given(**GRAIL_REPOSITORY, bilevel=BilevelOptions(interpolate=False, eps=1e-12))
    weights = credit(golden_policy, golden_batch, _context())
    assert golden_error(weights.values, golden["oar_g.weights"], golden_batch.response_mask) < roundings(
        4000, torch.float32
    )
    assert weights.fallback.tolist() == [False, False, False, False, True, False]


@pytest.mark.parametrize("distribution", ["answer_mean", "last", "answer_joint"])
def test_scores_are_finite_and_reach_the_reasoning_alone(distribution, golden_policy, golden_batch):
    weights = OARGradient(distribution=distribution)(golden_policy, golden_batch, _context())
    scope = scoped_tokens(golden_batch, golden_batch.answer, "reasoning")
    eligible = golden_batch.answer.whole.any(1)
    assert weights.values.isfinite().all()
    assert (weights.values[golden_batch.response_mask & ~scope] == 1).all()
    assert (weights.values[~golden_batch.response_mask] == 0).all()
    sums = (weights.values * scope).sum(1)[eligible]
    assert_near(sums, scope.sum(1)[eligible].to(sums), 64, torch.float32)
    assert ((weights.scores > 0) & scope).any(1)[eligible].all()


@pytest.mark.parametrize("alignment", ["token", "predictor"])
@pytest.mark.parametrize("scope", ["reasoning", "response"])
@pytest.mark.parametrize("distribution", ["answer_mean", "last", "answer_joint"])
def test_cutting_off_what_follows_the_answer_changes_nothing(
    distribution, scope, alignment, golden_policy, golden_batch
):
    """Against the scores of whole responses under the noise that the method draws for them."""
    credit = OARGradient(distribution=distribution, scope=scope, alignment=alignment, noise=0.1)
    rows = _boxed(golden_batch)
    whole = golden_batch.select(rows)
    assert whole.answer.after.any(), "the case must hold tokens behind the answer"
    noise = credit.draw_noise(golden_policy, whole, _context())
    scores = gradient_scores(golden_policy, whole, noise, distribution=distribution, alignment=alignment)
    found = credit(golden_policy, golden_batch, _context())
    length, tolerance = scores.shape[1], 1e3 * torch.finfo(torch.float32).eps  # norms compute in float32
    assert golden_error(found.scores[rows, :length], scores, whole.response_mask) < tolerance
    scope = scoped_tokens(whole, whole.answer, scope)
    expected = torch.where(scope, bilevel_map(scores, scope, eps=1e-8), whole.response_mask.double())
    assert golden_error(found.values[rows, :length], expected, whole.response_mask) < tolerance
