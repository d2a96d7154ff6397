"""Credit for the turns of a rollout: GiGPO, the scores of an environment, and IGPO.

Shapes: ``B`` rows, ``T`` response tokens, ``K`` turns of the row that has the most.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.core.functional.advantages import (
    discounted_returns,
    existing_turns,
    last_turns,
    relative,
    spread_turns,
    turn_numbers,
    turn_starts,
)
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options

_Baseline = Literal["turn", "group"]
_REWARDS_ALONE = "Rewards alone act."


class TurnTable(NamedTuple):
    """The turns of a batch. A batch without turns has one for each row with a token."""

    numbers: Tensor  # [B, T] long, the number of the turn of each sampled token, −1 elsewhere.
    exists: Tensor  # [B, K] bool

    @property
    def last(self) -> Tensor:
        """``[B, K]`` bool: the last turn of each row."""
        return last_turns(self.exists)


def turn_table(batch: RolloutBatch) -> TurnTable:
    """The turns of a batch."""
    numbers = turn_numbers(batch.response_mask, batch.turn)
    return TurnTable(numbers, existing_turns(numbers))


def check_scored(method: TokenCredit, sets: Sequence[Sequence[Prompt]], otherwise: str, *, needed: bool = True) -> str:
    """A remark if some training sets have no environment that scores turns; if none has and scores are needed an error.

    `otherwise` says what becomes of rollouts without scores: each rollout decides for itself.
    """
    tasks = [prompts[0].task for prompts in sets if len(prompts)]
    lacking = [task for task in tasks if not hasattr(getattr(task, "environment_class", None), "score_turn")]
    if not lacking:
        return ""
    name, has = type(method).__name__, f"that of `{type(lacking[0]).__name__}` has none."
    if len(lacking) < len(tasks):
        return (
            f"`{name}` reads the scores of the environment's method `score_turn`, but {len(lacking)} of {len(tasks)} "
            f"training sets lack it: {has} {otherwise}"
        )
    if not needed and any(task.has_environment for task in tasks):  # Else there are no turns.
        return f"`{name}` adds the scores of the environment's method `score_turn`, but {has} {otherwise}"
    judge = ", set `model.credit.judge`" if hasattr(method, "judge") else ""
    raise ValueError(
        f"`{name}` needs an environment with the method `score_turn`, but {has} Write it{judge}, or set `model.credit` "
        "to another method."
    )


def check_judged(method: TokenCredit, sets: Sequence[Sequence[Prompt]], otherwise: str) -> str:
    """A remark if some training sets have no turns that a judge could label; a ValueError if none has."""
    tasks = [prompts[0].task for prompts in sets if len(prompts)]
    lacking = [task for task in tasks if not task.has_environment]
    if not lacking:
        return ""
    text = f"`{type(method).__name__}` asks its judge about turns in an environment, but"
    if len(lacking) < len(tasks):
        return (
            f"{text} {len(lacking)} of {len(tasks)} training sets have none: `{type(lacking[0]).__name__}` is a task "
            f"of one turn. {otherwise}"
        )
    raise ValueError(
        f"{text} got `{type(lacking[0]).__name__}`, a task of one turn. Train on a task with an environment, or set "
        "`model.credit` to another method."
    )


def turn_scores(batch: RolloutBatch, exists: Tensor) -> Tensor:
    """``[B, K]`` float64 on the CPU: the environment's score of each turn, NaN where it gave none."""
    table = torch.full(exists.shape, torch.nan, dtype=torch.float64)
    for row, episode in enumerate(batch.episodes or ()):
        for k, turn in enumerate(episode.turns[: int(exists[row].sum())]):
            if turn.score is not None:
                table[row, k] = turn.score
    return table


def turn_beginnings(batch: RolloutBatch, turns: TurnTable) -> list[list[NDArray[np.integer[Any]]]]:
    """For each row, the ids before each of its turns, prompt included; a row without a token has a first turn, too."""
    starts = (turn_starts(turns.numbers, turns.exists.shape[1]) + batch.prompt_lengths[:, None]).tolist()
    masks = batch.attention_mask.cpu().numpy()
    whole = [ids[valid] for ids, valid in zip(batch.input_ids.cpu().numpy(), masks, strict=True)]
    numbers = turns.exists.sum(1).clamp(min=1).tolist()
    return [[ids[:start] for start in row[:n]] for ids, row, n in zip(whole, starts, numbers, strict=True)]


def turn_states(batch: RolloutBatch, turns: TurnTable) -> Tensor:
    """``[B, K]`` long on the CPU: the number of the state in which each turn began, −1 for one that does not exist.

    Turns of a group have one number if the environment gave their states one key; without keys, if the ids so far are
    the same. A row without a token has its first state.
    """
    numbers: dict[Hashable, int] = {}
    table = torch.full(turns.exists.shape, -1, dtype=torch.long)
    for row, (group, before) in enumerate(zip(batch.group.tolist(), turn_beginnings(batch, turns), strict=True)):
        told = batch.episodes[row].turns if batch.episodes else ()
        for k, ids in enumerate(before):
            key = told[k].state if k < len(told) else None
            state: Hashable = ("ids", ids.tobytes()) if key is None else ("key", key)
            table[row, k] = numbers.setdefault((group, state), len(numbers))
    return table


@dataclass(eq=False)
class GiGPO(TokenCredit):
    r"""Adds to the rollout's advantage that of each turn beside the turns that began in the same state.

    .. math:: A_{it} = A_i + \omega\, \bigl(R_{ik} - \bar R_{s_{ik}}\bigr), \qquad R_{ik} = \sum_{l \ge k}
              \gamma^{l-k} r_{il}

    Token ``t`` is of turn ``k``, which began in state ``s``; ``\bar R_s`` is the mean return of the turns of the group
    that began there. The reward ``r`` of the last turn is that of the rollout, and 0 before. A turn whose state occurs
    nowhere else adds nothing: `shared_states` is the share of turns whose state occurs in another rollout.

    States are those of the environment's `state_key`, else the ids so far. Without turns a rollout is one turn, and
    all of a group begin in one state.

    Args:
        omega: ω.
        discount: γ, of a turn.
        scores: Whether the environment's scores of turns are added to the rewards.
        standardise: Whether the difference is divided by the unbiased standard deviation of the returns of the state +
            1e-4, which goes with `advantage.scale: group`.

    Source: GiGPO, arXiv 2505.10978, and its published code, where rewards are those of the environment's steps, the
    mean of the group is taken over turns, and 1e-6 is added.
    """

    runs_policy = False

    omega: float = 1.0
    discount: float = 0.95
    scores: bool = False
    standardise: bool = False

    def __post_init__(self) -> None:
        check_options(self, omega="[0, inf)", discount="[0, 1]")

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: with `scores`, an environment scores turns."""
        return check_scored(self, sets, _REWARDS_ALONE, needed=False) if self.scores else ""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 1, and the advantages of turns as an additive stage."""
        turns, mask = turn_table(batch), batch.response_mask
        rewards = turns.last * batch.rewards.double()[:, None]
        if self.scores:
            rewards = rewards + turn_scores(batch, turns.exists).nan_to_num(0).to(rewards)
        states = turn_states(batch, turns).to(mask.device)
        returns = discounted_returns(rewards, self.discount)
        steps = self.omega * relative(returns, states, turns.exists, standardise=self.standardise)
        rows = torch.arange(len(batch), device=mask.device)[:, None].expand_as(states)[turns.exists]
        visits = torch.unique(torch.stack([states[turns.exists], rows]), dim=1)[0]
        return TokenWeights(
            values=mask.to(batch.advantages.dtype),
            additive=spread_turns(steps, turns.numbers).to(batch.advantages.dtype),
            metrics={"shared_states": Mean.share(torch.bincount(visits)[states[turns.exists]] > 1)},
        )


@dataclass(eq=False)
class TurnRewards(TokenCredit):
    r"""The return of each turn from the environment's scores of turns, beside those of the group.

    .. math:: A_{it} = R_{ik} - b, \qquad R_{ik} = \sum_{l \ge k} \gamma^{l-k} r_{il}

    Token ``t`` is of turn ``k``. ``r`` is what the environment's `score_turn` returned, 0 where it returned None; the
    last turn's also has the reward of the rollout. This is the whole advantage: `model.advantage` is refused. A
    rollout without an environment is one turn with the reward alone.

    Args:
        discount: γ, of a turn.
        baseline: ``b``, the mean return of the group's turns with the same number (`turn`), or of all of them
            (`group`), which punishes late turns where returns fall over a rollout.
        standardise: Whether the advantage is divided by the unbiased standard deviation of these returns + 1e-4.

    Source: ours; returns are subtracted as a whole, since rewards that are centred one by one before they are summed
    also reward or punish the number of turns.
    """

    replaces_advantage = True
    runs_policy = False

    discount: float = 1.0
    baseline: _Baseline = "turn"
    standardise: bool = False

    def __post_init__(self) -> None:
        check_options(self, discount="[0, 1]", baseline=_Baseline)

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: an environment scores turns."""
        return check_scored(self, sets, _REWARDS_ALONE, needed=False)

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 0, and the advantages as an additive stage."""
        turns = turn_table(batch)
        scores = turn_scores(batch, turns.exists).to(turns.exists.device)
        rewards = scores.nan_to_num(0) + turns.last * batch.rewards.double()[:, None]
        returns = discounted_returns(rewards, self.discount)
        places = torch.arange(returns.shape[1], device=returns.device) * (self.baseline == "turn")
        key = batch.group[:, None] * returns.shape[1] + places
        advantages = relative(returns, key, turns.exists, standardise=self.standardise)
        scored = ~scores.isnan()
        return TokenWeights.whole(
            spread_turns(advantages, turns.numbers).to(batch.advantages.dtype),
            batch.response_mask,
            metrics={
                "scored_turns": Mean(float(scored.sum()), float(turns.exists.sum())),
                "turn_score": Mean.over(scores.nan_to_num(0), scored),
            },
        )
