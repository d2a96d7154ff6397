"""Credit from continuations: how the chance of success changes from one step of a rollout to the next (VinePPO).

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch

from grail_lightning.core.credit.base import (
    CreditContext,
    Mean,
    TokenCredit,
    TokenWeights,
    check_one_turn,
    check_one_turn_sets,
    toward_outcome,
)
from grail_lightning.core.credit.grail import Gate, in_gate
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.rollout.grading import align_rows, labelled_steps
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.gallery.continuations import Prefix, SampledContinuations

_Search = Literal["bisection", "everywhere"]

_ONE_TURN = "continues rollouts from places within them", "Set another `model.credit`."


@dataclass
class _Row:
    """A rollout that is divided by borders, and the values that are known so far."""

    row: int
    places: list[int]  # Its borders, the beginning (0) and the end of the response included.
    values: dict[int, float] = field(default_factory=dict)  # By the border's index.
    lost: bool = False  # Whether a value is missing: the budget did not suffice, or no continuation has a reward.


@dataclass(eq=False)
class Resampled(TokenCredit):
    r"""Adds the change of value over each step, where a value is the mean reward of continuations by the policy.

    .. math:: A_{it} = A_i + c\,\bigl(V(s_{k+1}) - V(s_k)\bigr) \text{ for the tokens of step } k, \qquad
              V(s) = \frac{1}{K} \sum_{j=1}^{K} r(\text{continuation } j \text{ from } s)

    ``V`` of the beginning is the mean reward of the group, and that of the end is the rollout's own reward. So with
    `everywhere` the changes of a rollout sum to its reward less the group's mean. Steps end behind those that the task
    labels, or behind lines where it labels none.

    *Everywhere* draws from each border. *Bisection* looks for the first border behind which the outcome is decided: the
    value there is nearer to the rollout's own outcome than to the group's mean. The step that ends there has the change
    over it, the others have none.

    Rollouts outside the gate, without an advantage, or without a border keep weight 1. So do those for which the budget
    does not suffice, or of which no continuation from some place has a reward; they count as fallbacks. Rollouts of
    several turns are refused, because an environment cannot be brought back to the state that it had at a border.

    Args:
        continuations: K.
        search: bisection or everywhere.
        gate: Which rollouts are divided, by the sign of their advantage: negative, positive or all.
        scale: c, the factor of the changes.
        advantage: Whether the group's advantage ``A_i`` is kept; without it the changes are the whole advantage, as in
            VinePPO.
        budget: Most tokens of all continuations for a batch on one rank. It is never exceeded: places for which it
            might not suffice are left out, the latest places first.

    Source: VinePPO, arXiv 2410.01679 (everywhere, 9 continuations); segments as in SPO, arXiv 2505.23564. Bisection is
    ours.
    """

    services = (SampledContinuations,)

    continuations: int = 8
    search: _Search = "bisection"
    gate: Gate = "negative"
    scale: float = 1.0
    advantage: bool = True
    budget: int = 262_144

    def __post_init__(self) -> None:
        check_options(self, search=_Search, gate=Gate, scale="[0, inf)", continuations="[1, inf)", budget="[1, inf)")

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: no environment answers."""
        check_one_turn_sets(self, sets, *_ONE_TURN)
        return ""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 1 (0 in divided rollouts without the group's advantage), and the changes as an additive stage."""
        check_one_turn(self, batch, *_ONE_TURN)
        source = context.service(SampledContinuations)
        rows = self._rows(policy, batch)
        spent = self._measure(rows, batch, source)
        mask, advantages = batch.response_mask, batch.advantages
        values, additive = mask.to(advantages.dtype), torch.zeros(mask.shape, dtype=torch.float64)
        fallback = torch.zeros(len(batch), dtype=torch.bool)
        for row in rows:
            fallback[row.row] = row.lost
            if row.lost:
                continue
            if not self.advantage:
                values[row.row] = 0
            steps = [self._around(row)] if self.search == "bisection" else pairwise(range(len(row.places)))
            for before, after in steps:
                change = self.scale * (row.values[after] - row.values[before])
                additive[row.row, row.places[before] : row.places[after]] = change
        added = additive.to(mask.device, advantages.dtype)
        divided = sum(not row.lost for row in rows)
        return TokenWeights(
            values=values,
            scores=toward_outcome(added, batch),
            additive=added,
            fallback=fallback.to(mask.device),
            metrics={
                "continued_tokens": float(all_reduce(torch.tensor(spent, device=mask.device), "sum")),
                "divided": Mean(float(divided), len(batch)),
            },
        )

    def _rows(self, policy: Policy, batch: RolloutBatch) -> list[_Row]:
        """The rollouts inside the gate with their borders, the beginning, the end, and the values of both."""
        inside = (in_gate(self.gate, batch.advantages) & (batch.advantages != 0)).nonzero().flatten().tolist()
        rewards, group, lengths = batch.rewards.cpu().double(), batch.group.cpu(), batch.response_lengths.tolist()
        rows = []
        for row, places in zip(inside, find_borders(policy, batch, inside), strict=True):
            if places:
                ends = {0: float(rewards[group == group[row]].mean()), len(places) + 1: float(rewards[row])}
                rows.append(_Row(row, [0, *places, lengths[row]], ends))
        return rows

    def _measure(self, rows: list[_Row], batch: RolloutBatch, source: SampledContinuations) -> int:
        """Draw until the values are known that the search needs; returns the number of sampled tokens."""
        spent = 0
        device = batch.response_mask.device
        while True:
            requests = [(row, k) for row in rows if not row.lost for k in self._unknown(row)]
            if not all_reduce(torch.tensor(len(requests), device=device), "max"):
                return spent
            places = [Prefix(row.row, row.places[k]) for row, k in requests]
            drawn, tokens = source.draw(batch, places, self.continuations, self.budget - spent)
            spent += tokens
            for (row, k), rewards in zip(requests, drawn, strict=True):
                if not rewards:
                    row.lost = True
                else:
                    row.values[k] = sum(rewards) / len(rewards)

    def _unknown(self, row: _Row) -> list[int]:
        last = len(row.places) - 1
        if self.search == "everywhere":
            return [k for k in range(1, last) if k not in row.values]
        low, high = self._around(row)
        return [(low + high) // 2] if high - low > 1 else []

    def _around(self, row: _Row) -> tuple[int, int]:
        """The last known border at which the outcome is open, and the next known one, where it is decided."""
        start, end = row.values[0], row.values[len(row.places) - 1]
        low = 0
        for k in sorted(row.values):
            if k and abs(row.values[k] - end) < abs(row.values[k] - start):
                return low, k
            low = k
        return low, low


def find_borders(policy: Policy, batch: RolloutBatch, rows: list[int]) -> list[list[int]]:
    """The borders between the steps of some rows, each as the number of response tokens before it, in rising order.

    A border behind a piece of text is the one behind the token that holds its last character.
    """
    lengths, of_rows = batch.response_lengths.tolist(), []
    for row, aligned in zip(rows, align_rows(batch, policy.tokenizer, rows), strict=True):
        ends = [step.stop for step in labelled_steps(aligned.text, batch.prompts[row]) or []]
        ends = ends or [place + 1 for place, character in enumerate(aligned.text) if character == "\n"]
        behind = {max(tokens) + 1 for end in ends if end and (tokens := aligned.overlapping(end - 1, end))}
        of_rows.append(sorted(place for place in behind if 0 < place < lengths[row]))
    return of_rows
