"""GRAIL: gradient-reweighted advantages (arXiv 2606.04889)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext, Mean, Refresh, TokenWeights, one_elsewhere
from grail_lightning.core.credit.saliency import Leaf, SaliencyCredit, SaliencyTarget
from grail_lightning.core.functional.weighting import answer_overwrite, grail_map, mean_one
from grail_lightning.core.policy.layout import ReadAt
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import AnswerMasks, RolloutBatch
from grail_lightning.core.rollout.grading import WhichBox, align_rows, answer_masks
from grail_lightning.core.runtime.checks import check_options

Gate = Literal["negative", "positive", "all"]
_Overwrite = Literal["always", "gated", "never"]
_Normalise = Literal["none", "mean_one"]


def in_gate(gate: Gate, advantages: Tensor) -> Tensor:
    """``[B]`` bool: the rows that a gate lets through, by the sign of their advantage; negative takes 0, too."""
    above = advantages > 0
    return above if gate == "positive" else ~above if gate == "negative" else torch.ones_like(above)


@dataclass(frozen=True, kw_only=True)
class SaliencyOptions:
    """Where and when saliency is measured.

    Attributes:
        leaf: embeddings, or the output of a block: first (block 1), middle (n // 2), last (n − 1, the last one but
            one), or its number.
        read_at: The position that is read for token t: predictor is t − 1, which predicts it; token is t itself.
        box: The box whose likelihood is explained: last is the box that is graded; first is that of the published code.
        refresh: batch computes the weights once for a batch of rollouts; step computes them again before every
            optimiser step, as the published code does.
        fuse: Whether saliency is taken from the update's first forward pass where the result is the same
            (`grail_lightning.core.step.fused.method_to_fuse` lists when). Otherwise it needs a forward pass of its own.
    """

    leaf: Leaf | int = "embeddings"
    read_at: ReadAt = "predictor"
    box: WhichBox = "last"
    refresh: Refresh = "batch"
    fuse: bool = True

    def __post_init__(self) -> None:
        check_options(self, read_at=ReadAt, box=WhichBox, refresh=Refresh)
        if not isinstance(self.leaf, int):
            check_options(self, leaf=Leaf)
        elif isinstance(self.leaf, bool) or self.leaf < 0:
            raise ValueError(f"`leaf` must be embeddings, first, middle, last or a block number, but got {self.leaf}.")


@dataclass(eq=False)
class GRAIL(SaliencyCredit):
    r"""Weights that grow with the effect of each position on the likelihood of the model's own answer.

    .. math:: \phi = -\sum_{t \in box} \log\pi(y_t), \quad s_t = \lVert \partial\phi/\partial a \odot a \rVert_2, \quad
              w_t = \mathrm{clamp}(\mu + \sigma\,\mathrm{zscore}(\log(s_t + 10^{-8})),\ w_{min}, w_{max})

    The z-score is that of one rollout, over all of its response tokens: the box is among them, and so is what follows
    it, whose saliency is 0. The box is the answer in the form of the task, with its marker, and a truncated rollout may
    have one, too. Only rollouts inside the gate that have a complete box and a non-zero advantage need computation
    (their share is `credit/eligible`); those inside the gate without a box, whatever their advantage, keep weight 1
    (`credit/span_missing`). The method differs from the published code in its exact spans, in the choice of the last
    box, and in computing the weights once a batch (see `reference/methods.md`).

    Args:
        gate: Which rollouts are reweighted, by the sign of their advantage: negative, positive or all. A rollout with
            the advantage 0 passes the gate negative, as published; its weights are not computed, since they change
            nothing, but it counts in `credit/span_missing`.
        mean: Weight of a token of average log-saliency.
        std: Standard deviation of the weights before they are clamped.
        w_min: Lower clamp.
        w_max: Weight of the answer's content, and upper clamp of other tokens, which with the defaults hardly ever
            reach it.
        answer_overwrite: Whether the answer's content gets the weight `w_max`, and its marker (a token of both
            included) and what follows it the weight `mean`: always (also outside the gate, as published), gated, or
            never.
        normalise: none; or mean_one, which keeps the total step size of each rollout.
        saliency: Where and when saliency is measured.

    Source: arXiv 2606.04889 and its published trainer.
    """

    gate: Gate = "negative"
    mean: float = 1.0
    std: float = 0.5
    w_min: float = 0.5
    w_max: float = 5.0
    answer_overwrite: _Overwrite = "always"
    normalise: _Normalise = "none"
    saliency: SaliencyOptions = SaliencyOptions()

    def __post_init__(self) -> None:
        check_options(self, mean="[0, inf)", std="[0, inf)", w_max="[0, inf)", w_min=f"[0, {self.w_max}]")
        check_options(self, gate=Gate, answer_overwrite=_Overwrite, normalise=_Normalise)

    @property
    def refresh(self) -> Refresh:
        """See `TokenCredit`."""
        return self.saliency.refresh

    @property
    def fuses(self) -> bool:
        """See `TokenCredit`."""
        return self.saliency.fuse

    def target(self, policy: Policy, batch: RolloutBatch) -> SaliencyTarget:
        """The likelihood of the answer, in the rows inside the gate."""
        answer = self._answer(policy, batch)
        rows = in_gate(self.gate, batch.advantages) & answer.whole.any(1) & (batch.advantages != 0)
        leaf, read_at = self.saliency.leaf, self.saliency.read_at
        return SaliencyTarget(explained=answer.whole, rows=rows, leaf=leaf, read_at=read_at)

    def weights_from(self, scores: Tensor, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights ``[B, T]`` from saliency ``[B, T]``."""
        answer, mask = self._answer(policy, batch), batch.response_mask
        gated, boxed = in_gate(self.gate, batch.advantages), answer.whole.any(1)
        eligible = gated & boxed & (batch.advantages != 0)
        # mean + std · (z-score of log saliency in the row), clamped.
        mapped = grail_map(scores, mask, mean=self.mean, std=self.std, w_min=self.w_min, w_max=self.w_max)
        values = one_elsewhere(mapped, eligible[:, None], mask)
        if self.answer_overwrite != "never":
            # Marker, braces and what follows get `mean`; the reasoning keeps its weights.
            written = answer_overwrite(values, answer, mask, content=self.w_max, rest=self.mean)
            everywhere = self.answer_overwrite == "always"
            values = written if everywhere else torch.where((gated & boxed)[:, None], written, values)
        scales = self.normalise == "mean_one"
        return TokenWeights(
            values=mean_one(values, mask) if scales else values,
            unscaled=values if scales else None,
            scores=scores,
            fallback=gated & ~boxed,
            answer=answer,
            metrics={"eligible": Mean.share(eligible)},
        )

    def _answer(self, policy: Policy, batch: RolloutBatch) -> AnswerMasks:
        if self.saliency.box == "last":
            return batch.answer
        return answer_masks(batch, align_rows(batch, policy.tokenizer), self.saliency.box)
