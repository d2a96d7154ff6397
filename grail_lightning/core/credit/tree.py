"""Credit from the rollouts of the group: values of the states that they pass through, λ-GRPO, the optimal baseline.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from grail_lightning.core.credit.base import (
    CreditContext,
    Mean,
    TokenCredit,
    TokenWeights,
    check_one_turn,
    check_one_turn_sets,
    rows_by_group,
    toward_outcome,
)
from grail_lightning.core.credit.measure import gradient_energies
from grail_lightning.core.credit.turns import turn_states, turn_table
from grail_lightning.core.functional.advantages import (
    EQUAL_REWARDS,
    group_std,
    group_sums,
    spread_turns,
    sum_by_turn,
    turn_changes,
)
from grail_lightning.core.functional.states import state_values, value_changes
from grail_lightning.core.functional.tokens import running_sum
from grail_lightning.core.policy.layout import group_nodes
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import RolloutBatch, SampledBatch
from grail_lightning.core.rollout.grading import align_rows
from grail_lightning.core.runtime.checks import check_options

_State = Literal["prefix", "numbers", "turns"]
_Unit = Literal["token", "turn"]

_ONE_TURN = "reads states (`state: numbers`) from the text of one response", "Set `state: prefix` or `state: turns`."
_EPS = 1e-8
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(eq=False)
class TreeAdvantage(TokenCredit):
    r"""Adds to each token's advantage the change of value from the state before it to the state after it.

    The responses of a group form a prefix tree. The value of a state is the mean reward of the group's rows that reach
    it, so the values need no model and no further sampling:

    .. math:: A_{it} = A_i + c\,\bigl(V(s_t) - V(s_{t-1})\bigr), \qquad
              V(s) = \frac{1}{n_s} \sum_{j \text{ reaches } s} r_j

    With `own_row` off, the values of row ``i`` are those of the other rows, shrunk to the value of the state before:

    .. math:: V_{-i}(s_t) = \frac{\sum_{j \ne i} r_j + \kappa V_{-i}(s_{t-1})}{n_{s_t} - 1 + \kappa}

    The terms of a row that is alone in its states are 0, so the method becomes `Uniform` where texts part early:
    `in_tree` is the share of tokens that are in a state with another row. What an environment answers is part of the
    prefix; no token is credited with a change of value over it.

    Args:
        own_row: Whether a row counts in its own values.
        shrinkage: κ, the number of rewards that the value of the state before stands for; used if `own_row` is off.
        scale: c, the factor of the terms.
        standardise: Whether the terms are divided by the unbiased standard deviation of the group's rewards + 1e-4,
            which goes with `advantage.scale: group`. Without a deviation they are 0.
        advantage: Whether the group's advantage ``A_i`` is kept; without it the terms are the whole advantage.
        state: The state: `prefix`, the tokens so far; or `numbers`, the set of numbers completed so far, where all
            tokens from one state to the next get the change between them, those after the last state the reward less
            its value; or `turns`, the states in which turns begin, by the environment's `state_key`, else the ids so
            far, where `in_tree` is the share of turns.

    Source: TEMPO, arXiv 2509.18314, and its published code, which keeps the row, divides by the standard deviation +
    1e-6 or not at all, and has no scale; states: Numca, arXiv 2605.29782; `own_row: false` is ours.
    """

    runs_policy = False

    own_row: bool = True
    shrinkage: float = 1.0
    scale: float = 1.0
    standardise: bool = False
    advantage: bool = True
    state: _State = "prefix"

    @property
    def replaces_advantage(self) -> bool:
        """Whether the terms are the whole advantage."""
        return not self.advantage

    def __post_init__(self) -> None:
        check_options(self, shrinkage="[0, inf)", scale="[0, inf)", state=_State)

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: numbers are read from one response."""
        if self.state == "numbers":
            check_one_turn_sets(self, sets, *_ONE_TURN)
        return ""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 1 (0 without the group's advantage), and the terms as an additive stage."""
        mask, advantages = batch.response_mask, batch.advantages
        rewards = batch.rewards.cpu().double()
        changes, shared = self._changes(policy, batch, rewards)
        # A rounding error is no change.
        terms = self.scale * changes.masked_fill(changes.abs() <= EQUAL_REWARDS, 0)
        if self.standardise:
            std = group_std(rewards, batch.group.cpu())
            terms = terms * torch.where(std > EQUAL_REWARDS, 1 / (std + 1e-4), 0)[:, None]
        additive = terms.to(advantages).masked_fill(~mask, 0)
        return TokenWeights(
            values=(mask & self.advantage).to(advantages.dtype),
            scores=toward_outcome(additive, batch),
            additive=additive,
            metrics={"in_tree": Mean.share(shared)},
        )

    def _changes(self, policy: Policy, batch: RolloutBatch, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T]``: the change of value that each token belongs to; and which states are those of several rows."""
        options: dict[str, Any] = {"own_row": self.own_row, "shrinkage": self.shrinkage}
        if self.state == "turns":
            turns = turn_table(batch)
            exists, states = turns.exists.cpu(), turn_states(batch, turns)
            values, reached = state_values(states, rewards, **options)
            changes = turn_changes(values, rewards, exists)
            return spread_turns(changes, turns.numbers.cpu()), reached[exists] > 1
        if self.state == "numbers":
            check_one_turn(self, batch, *_ONE_TURN)
        path = prefix_path(batch) if self.state == "prefix" else _numbers_path(batch, policy)
        values, reached = state_values(path, rewards, **options)
        return value_changes(path, rewards, values), reached[:, 1:][batch.response_mask.cpu()] > 1


class PrefixWeights(TokenCredit):
    r"""Weights that undo the sharing of prefixes: GRPO is a process reward whose steps count once for each row.

    .. math:: w_t = 1 / \#\{\text{rows of the group that begin with } y_1 \ldots y_t\}

    Source: λ-GRPO, arXiv 2509.21154, and its published code.
    """

    runs_policy = False

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the prefix tree of each group."""
        nodes, mask = group_nodes(batch), batch.response_mask
        valid = nodes >= 0
        sharing = torch.bincount(nodes[valid], minlength=1)[nodes.clamp(min=0)]
        values = torch.where(mask, 1 / sharing.to(mask.device, batch.advantages.dtype), 0)
        return TokenWeights(values=values, metrics={"in_tree": Mean.share(sharing[mask.cpu()] > 1)})


@dataclass(eq=False)
class OptimalBaseline(TokenCredit):
    r"""Replaces the group's mean by a baseline for each position, which weighs rows by the variance of their gradient.

    .. math:: A_{it} = r_i - B_t, \qquad B_t = \frac{\sum_j r_j W_{jt}}{\sum_j W_{jt}}, \qquad
              W_{jt} = \sum_{k \le t} \Bigl(1 - 2 \pi_{jk} + \sum_v \pi_k(v)^2\Bigr)

    over the rows ``j`` of the group that have a token ``t``, of an environment's answer, too, whose tokens have no
    summand. The summand is the squared norm of the gradient of a token's log-probability with respect to its logits.
    The whole advantage is the additive stage, so `model.advantage` is refused. Positions that one row alone
    reaches have the baseline 0. Groups without an advantage have none and need no forward pass.

    Args:
        unit: What has a baseline: each position (`token`, as published), or each number of a `turn`, whose ``W`` is
            summed up to the turn's end.

    Source: the published code of verl, `compute_optimal_token_baseline_advantage`. There ``1e-8`` is added to the
    denominator alone; here to each ``W``, so that the baseline of certain tokens is the mean reward, not 0.
    """

    replaces_advantage = True

    unit: _Unit = "token"

    def __post_init__(self) -> None:
        check_options(self, unit=_Unit)

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 0, and the advantage as an additive stage."""
        mask, rewards = batch.response_mask, batch.rewards.double()
        total, size = group_sums(rewards, batch.group)
        differs = (rewards - total / size).abs() > EQUAL_REWARDS  # Else the baseline is the reward.
        live = torch.isin(batch.group, batch.group[differs & (batch.advantages != 0)])
        energy = gradient_energies(policy, batch, context, live.nonzero().flatten())
        turns, by_unit, exists = turn_table(batch), energy, batch.valid_mask
        if self.unit == "turn":
            exists = turns.exists
            by_unit = sum_by_turn(energy, turns.numbers, exists.shape[1])
        additive = torch.zeros(exists.shape, dtype=torch.float64, device=mask.device)
        for rows in rows_by_group(batch):
            if not live[rows[0]]:
                continue
            weight = (running_sum(by_unit[rows], 1) + _EPS) * exists[rows]
            baseline = (weight * rewards[rows, None]).sum(0) / weight.sum(0).clamp(min=_EPS)
            baseline = torch.where(exists[rows].sum(0) > 1, baseline, 0)
            additive[rows] = (rewards[rows, None] - baseline) * exists[rows]
        additive = spread_turns(additive, turns.numbers) if self.unit == "turn" else additive * mask
        return TokenWeights.whole(additive.to(batch.advantages.dtype), mask)


def numbers(text: str) -> list[tuple[int, int]]:
    """Where a text completes a new number: the characters until then, and a key of the set of numbers so far.

    A number is complete when the character after it has been read. Numbers have no sign, since ``12-3`` is no −3.

    Source: Numca, arXiv 2605.29782.
    """
    seen: set[str] = set()
    key, marks = 0, []
    for match in _NUMBER.finditer(text):
        if match[0] not in seen and match.end() < len(text):
            seen.add(match[0])
            key ^= hash(match[0])  # Of 64 bits for the whole set, so that n keys take n, not n², numbers.
            marks.append((match.end() + 1, key))
    return marks


def prefix_path(batch: SampledBatch) -> Tensor:
    """``[B, T + 1]``: the state before the first token, which is the group's, and after each token; −1 on padding.

    States are the prefixes of each group's responses, numbered as the nodes of its prefix tree.
    """
    nodes = group_nodes(batch)
    start = int(nodes.max()) + 1 if nodes.numel() else 0
    _, roots = torch.unique(batch.group.cpu(), return_inverse=True)
    return torch.cat([start + roots[:, None], nodes], 1)


def _numbers_path(batch: RolloutBatch, policy: Policy) -> Tensor:
    """``[B, T + 1]``: the sets of `numbers` as states, of each group by itself; a row begins with the empty set.

    A token that covers the character at which a state is reached belongs to it.
    """
    node_numbers: dict[tuple[int, int], int] = {}
    path = torch.full((len(batch), batch.response_mask.shape[1] + 1), -1, dtype=torch.long)
    for row, (group, aligned) in enumerate(zip(batch.group.tolist(), align_rows(batch, policy.tokenizer), strict=True)):
        length = len(aligned.stops)
        path[row, : length + 1] = node_numbers.setdefault((group, 0), len(node_numbers))
        token = 0
        for stop, key in numbers(aligned.text):
            while token < length - 1 and aligned.stops[token] < stop:
                token += 1
            path[row, token + 1 : length + 1] = node_numbers.setdefault((group, key), len(node_numbers))
    return path
