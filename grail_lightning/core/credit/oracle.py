"""The credit that labels of steps allow: `Oracle`, the upper bound of what a method can find.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from grail_lightning.core.credit.base import CreditContext, TokenCredit, TokenWeights, uniform_weights
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.rollout.grading import LocatedStep, located_steps
from grail_lightning.core.runtime.checks import check_options

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

    runs_policy = False

    gate: ClassVar[str] = "negative"  # Without a wrong rollout there is nothing to move.
    right: Right = "uniform"
    w_max: float | None = None

    def __post_init__(self) -> None:
        check_options(self, right=Right)
        if self.w_max is not None:
            check_options(self, w_max="(0, inf)")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the labels of the task."""
        located = located_steps(batch, policy.tokenizer)
        # Filler carries no reasoning: it is no step that a right and a wrong response have in common.
        steps = [[step.tokens for step in row or [] if step.kind != "filler"] for row in located]
        signs, groups = batch.advantages.sign().tolist(), batch.group.tolist()
        first = [_first_flaw(row or []) if sign < 0 else None for row, sign in zip(located, signs, strict=True)]
        places: list[Places | None] = [None] * len(batch)
        for row, sign in enumerate(signs):
            if sign == 0 or (sign > 0 and self.right == "uniform"):
                continue
            flaws = [first[row]] if sign < 0 else [f for f, g in zip(first, groups, strict=True) if g == groups[row]]
            places[row] = counted_places(flaws, dict(enumerate(steps[row])))
        return concentrate(batch, places, self.w_max)


Places = list[tuple[Sequence[int], float]]
"""Tokens of a row, with a factor for their share of the row's credit."""


def counted_places(numbers: Iterable[int | None], tokens: Mapping[int, Sequence[int]]) -> Places:
    """The tokens of each numbered part that has some, with how often the number occurs; None is left out."""
    counts = Counter(number for number in numbers if number is not None)
    return [(tokens[k], count) for k, count in counts.items() if tokens.get(k)]


def concentrate(batch: RolloutBatch, places: Sequence[Places | None], w_max: float | None) -> TokenWeights:
    """Weights that move the credit of a row to its places, as `Oracle` says; None leaves a row uniform.

    So does a row without a place, which counts as a fallback.
    """
    uniform = uniform_weights(batch)
    values, fallback = uniform.values.cpu(), uniform.fallback.cpu()
    for row, (length, of_row) in enumerate(zip(batch.response_lengths.tolist(), places, strict=True)):
        fallback[row] = of_row == []
        if of_row:
            values[row], total = 0, sum(count for _, count in of_row)
            for tokens, count in of_row:
                values[row, list(tokens)] += length / len(tokens) * count / total
            values[row].clamp_(max=w_max or math.inf)
    device = batch.response_mask.device
    return TokenWeights(values=values.to(device), fallback=fallback.to(device))


def _first_flaw(steps: list[LocatedStep]) -> int | None:
    kinds = (step.kind for step in steps if step.kind != "filler")
    return next((k for k, kind in enumerate(kinds) if kind in ("slip", "misconception")), None)
