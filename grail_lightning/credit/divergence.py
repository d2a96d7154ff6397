"""DGPO: credit by how far the policy has moved from the reference, where it is unsure (arXiv 2605.03327).

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.credit.forward import measure_rows
from grail_lightning.functional import masked_sum
from grail_lightning.functional.certainty import hellinger
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import TokenLayout


class DGPO(TokenCredit):
    r"""Weights that grow where the policy has moved away from the reference and has a high entropy.

    .. math:: w_t = T\, \mathrm{softmax}_t(s / \tau), \qquad s_t = d_t\, h_t^{\kappa}, \qquad
              d_t = 1 - \sum_v \sqrt{\pi(v)\, \pi_{ref}(v)}, \qquad h_t = H_t / \log |V|

    over the ``T`` tokens of a rollout, whose weights have the mean 1. At the first step the policy is the reference and
    all weights are 1. Rows without an advantage have weight 1 and need no forward pass; the others need one of the
    policy and one of the reference. The reference is the policy before training (without its adapters, for LoRA), which
    the run keeps in memory as with a KL term.

    Args:
        entropy_power: κ, the power of the normalised entropy; 0 leaves it out.
        temperature: τ of the softmax.

    Raises:
        ValueError: If `entropy_power` is negative or `temperature` is not positive.

    Source: arXiv 2605.03327. No published code was found; the logits are divided by the sampling temperature, which is
    our choice.
    """

    needs_reference = True

    def __init__(self, entropy_power: float = 1.0, temperature: float = 0.5) -> None:
        if not 0 <= entropy_power < math.inf:
            raise ValueError(f"`entropy_power` must be finite and ≥ 0, but got {entropy_power}. Use 0 to leave it out.")
        if not 0 < temperature < math.inf:
            raise ValueError(f"`temperature` must be finite and positive, but got {temperature}. Published is 0.5.")
        self.entropy_power, self.temperature = entropy_power, temperature

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch whose advantages are set."""
        mask, weighed = batch.response_mask, batch.advantages != 0
        distance, scores = self._scores(policy, batch, context, weighed.nonzero().flatten())
        scored = mask & weighed[:, None]
        share = torch.softmax((scores / self.temperature).masked_fill(~mask, -torch.inf), 1)
        lengths = mask.sum(1, keepdim=True)
        values = torch.where(scored, share * lengths, mask.to(share.dtype))
        return TokenWeights(
            values=values,
            scores=scores,
            fallback=torch.zeros_like(weighed),
            metrics={"reference_distance": Mean(masked_sum(distance, scored).item(), scored.sum().item())},
        )

    def _scores(
        self, policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The distance ``d`` and the scores ``s``, ``[B, T]`` each, zero on other rows."""
        reference = context.reference
        if reference is None:
            raise ValueError(
                "`DGPO` needs the frozen reference, but the context has none. Call it from a run, or pass "
                "`CreditContext(reference=…)`."
            )

        def other_head(states: Tensor) -> Tensor:
            with reference.running(policy) as frozen:
                return frozen.head(states)

        def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
            with reference.running(policy) as frozen:
                others = layout.at_predictors(frozen.decode(layout))
            found = hellinger(
                layout.at_predictors(policy.decode(layout)),
                others,
                policy.head,
                other_head,
                temperature=context.temperature,
                chunk_tokens=policy.chunk_tokens,
            )
            return tuple(layout.to_rows(figure) for figure in found)

        distance, entropy = measure_rows(policy, batch, context, rows, measure, 2)
        vocabulary = policy.model.config.get_text_config().vocab_size
        return distance, distance * (entropy / math.log(vocabulary)).clamp(min=0).pow(self.entropy_power)
