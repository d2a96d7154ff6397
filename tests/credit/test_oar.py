"""Parity of OAR-G with the golden tensors, which are of the re-implementation in the GRAIL repository."""

from dataclasses import fields, replace

import torch

from grail_lightning.credit import BilevelOptions, OARGradient
from grail_lightning.policy import Policy
from tests.credit.rollouts import assert_golden, context

GRAIL_REPOSITORY = {"scope": "response", "alignment": "predictor", "product": "noisy"}


def _hidden_without_positions(self, attention_mask, input_ids, *, embeds=None):
    return self.decoder(
        inputs_embeds=self.embed(input_ids) if embeds is None else embeds,
        attention_mask=attention_mask.long(),
        use_cache=False,
    ).last_hidden_state


def test_scores_equal_the_golden_tensors_end_to_end(golden, golden_policy, golden_batch, monkeypatch):
    """The golden tensors count positions from the padding on. Rotary angles and norms round in float32, and a KL of
    1e-7 shows it: with the same positions we are equal, with ours (padding not counted) within that rounding."""
    rows = golden_batch.answer.whole.any(1).nonzero().flatten()
    # Nothing is trimmed away, so that the golden noise fits as it is.
    names = ("input_ids", "attention_mask", "response_ids", "response_mask")
    masks = {f.name: getattr(golden_batch.answer, f.name)[rows] for f in fields(golden_batch.answer)}
    batch = golden_batch.replace(**{n: getattr(golden_batch, n)[rows] for n in names})
    batch = batch.replace(answer=replace(batch.answer, **masks))
    noise, expected = golden["oar_g.noise"][rows], golden["oar_g.scores"][rows]
    credit = OARGradient(alignment="predictor", product="noisy")
    ours = credit.gradient_scores(golden_policy, batch, noise, context())
    assert_golden(ours, expected, batch.response_mask, 1000)
    monkeypatch.setattr(Policy, "hidden", _hidden_without_positions)
    same = credit.gradient_scores(golden_policy, batch, noise, context())
    assert_golden(same, expected, batch.response_mask)


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
    weights = credit(golden_policy, golden_batch, context())
    assert_golden(weights.values, golden["oar_g.weights"], golden_batch.response_mask, 4000)
    assert weights.fallback.tolist() == [False, False, False, False, True, False]
