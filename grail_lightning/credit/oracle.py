"""Credit on the first flawed step, where the task labels steps.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, TokenCredit, TokenWeights, uniform_weights
from grail_lightning.grading import LocatedStep, located_steps
from grail_lightning.policy import Policy
from grail_lightning.runtime.checks import check_options

Right = Literal["uniform", "balanced"]


@dataclass(eq=False)
class Oracle(TokenCredit):
    r"""All credit of a wrong response on its first flawed step, as the task labels it: an experiment, not a method.

    .. math:: w_t = \min\bigl([t \in \text{step}]\, L / |\text{step}|,\ w_{max}\bigr)

    ``L`` is the number of the response's tokens, so that without ``w_max`` the sum of the weights stays the same. A
    step's tokens are those of its result, where an error is visible. Wrong are responses with a negative advantage.

    Right ones (with a positive advantage) stay uniform, or with `right: balanced` their credit is moved to the same
    places: with ``c_k`` wrong responses of the group whose first flawed step is the ``k``-th, filler not counted,

    .. math:: w_t = \min\Bigl(\sum_k [t \in \text{step}_k]\, \frac{c_k}{\sum_j c_j} \frac{L}{|\text{step}_k|},\
              w_{max}\Bigr)

    over the steps that the right response has. A response without such a step, or that the task cannot label, is
    uniform and counts as a fallback.

    Args:
        right: The weights of right responses: uniform | balanced.
        w_max: The largest weight; None keeps the sum of the weights.

    Source: the idea of EGCA, arXiv 2603.16158, with the task in place of its executor. `balanced` is ours.
    """

    right: Right = "uniform"
    w_max: float | None = None

    def __post_init__(self) -> None:
        check_options(self, right=Right)
        if self.w_max is not None:
            check_options(self, w_max="(0, inf)")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the labels of the task."""
        uniform = uniform_weights(batch)
        values, fallback = uniform.values.cpu(), uniform.fallback.cpu()
        located = located_steps(batch, policy.tokenizer)
        # Filler carries no reasoning: it is no step that a right and a wrong response have in common.
        steps = [[step for step in row or [] if step.kind != "filler"] for row in located]
        signs, groups = batch.advantages.sign().tolist(), batch.group.tolist()
        first = [_first_flaw(row) if sign < 0 else None for row, sign in zip(steps, signs, strict=True)]
        lengths = batch.response_lengths.tolist()
        for row, sign in enumerate(signs):
            if sign == 0 or (sign > 0 and self.right == "uniform"):
                continue
            if sign < 0:
                flaw = first[row]
                places = {} if flaw is None else {flaw: 1}
            else:
                flaws = (flaw for flaw, group in zip(first, groups, strict=True) if group == groups[row])
                places = Counter(flaw for flaw in flaws if flaw is not None)
            own = steps[row]
            places = {k: number for k, number in places.items() if k < len(own) and own[k].tokens}
            fallback[row] = not places
            if places:
                values[row] = 0
            for k, number in places.items():
                tokens = own[k].tokens
                values[row, tokens] += lengths[row] / len(tokens) * number / sum(places.values())
        if self.w_max is not None:
            treated = batch.advantages.cpu() < 0 if self.right == "uniform" else batch.advantages.cpu() != 0
            values = torch.where(treated[:, None], values.clamp(max=self.w_max), values)
        device = batch.response_mask.device
        return TokenWeights(values=values.to(device), fallback=fallback.to(device))


def _first_flaw(steps: list[LocatedStep]) -> int | None:
    """The index of the first flawed step."""
    return next((k for k, step in enumerate(steps) if step.kind in ("slip", "misconception")), None)
