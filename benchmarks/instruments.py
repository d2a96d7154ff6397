"""Credit that study_instruments.yaml trains with, and that the package does not have, since it is no method to use.

The whole advantage of each class is its additive stage.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch

from grail_lightning import Policy, RolloutBatch
from grail_lightning.core.credit.measure import logprobs
from grail_lightning.core.credit.tree import prefix_path
from grail_lightning.credit import CreditContext, SampledContinuations, TokenCredit, TokenWeights
from grail_lightning.gallery.continuations import Prefix

CERTAIN = 1e-3  # A token is a choice if its probability is below one less this.
_BUDGET = 10**9  # Tokens of continuations: no place is left out.


class BySign(TokenCredit):
    """One advantage for right rollouts and one, negative, for wrong ones, in groups that have both.

    Wrong rollouts alone (0 and 1) are negative sample reinforcement (arXiv 2506.01347); right rollouts alone (1 and 0)
    are `advantage.share: 0`.
    """

    def __init__(self, right: float, wrong: float) -> None:
        self.right, self.wrong = right, wrong

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        live = torch.isin(batch.group, batch.group[batch.advantages != 0])
        advantages = torch.where(batch.correct, self.right, -self.wrong) * live
        mask = batch.response_mask
        return TokenWeights.whole((advantages[:, None] * mask).to(batch.advantages), mask)


class ResampledChoices(TokenCredit):
    r"""The value of the state after each token, less a share of the value of the state before it: nearly exact credit.

    It samples many times as many tokens as the rollouts have.

    .. math:: A_{it} = V(s_t) - c\, V(s_{t-1})

    Values are means over continuations from the state before each token that was a choice; a token that was none leaves
    the value as it is, and the value of a whole response is its reward. Rows in one state have one value.

    Args:
        share: c.
        continuations: The number of continuations of each state.
    """

    services = (SampledContinuations,)

    def __init__(self, share: float = 0.25, continuations: int = 8) -> None:
        self.share, self.continuations = share, continuations

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        mask = batch.response_mask
        chosen = mask & (logprobs(policy, batch, context, torch.arange(len(batch))).exp() < 1 - CERTAIN)
        states = prefix_path(batch)[:, :-1]  # Before each token.
        places: dict[int, Prefix] = {}
        for row, column in chosen.nonzero().tolist():
            places.setdefault(int(states[row, column]), Prefix(row, column))
        outcomes, spent = context.service(SampledContinuations).draw(
            batch, [*places.values()], self.continuations, _BUDGET
        )
        found = {s: sum(o) / self.continuations for s, o in zip(places, outcomes, strict=True) if o is not None}
        assert len(found) == len(places)
        after = batch.rewards.float()
        additive = torch.zeros(mask.shape)
        for t in range(mask.shape[1] - 1, -1, -1):
            before = torch.tensor([found.get(s, float("nan")) for s in states[:, t].tolist()])
            before = torch.where(chosen[:, t] & ~before.isnan(), before, after)
            additive[:, t] = (after - self.share * before) * mask[:, t]
            after = torch.where(mask[:, t], before, after)
        return TokenWeights.whole(additive, mask, metrics={"continued_tokens": float(spent)})
