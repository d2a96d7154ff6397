"""Stored rollouts of several turns, played again: the environments answer to the turns that were sampled.

The environments of the worlds are deterministic, and copies of one go their own ways, so rollouts of a problem that
begin alike share what their first turns were answered.

Shapes: ``B`` rows, ``T`` tokens after the prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, cast, get_args

import torch
from torch import Tensor

from grail_lightning.app.benchmark.reads import watched_turn
from grail_lightning.core.engines.base import build_batch, decode
from grail_lightning.core.environments.dialogue import Dialect
from grail_lightning.core.environments.tools import call_number, call_reset, call_state, new_environment
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.episode import EndReason, Episode, ToolCall, Turn
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, pictures_in
from grail_lightning.core.records.task import Prompt, TokenText
from grail_lightning.core.rollout.batch import SampledBatch
from grail_lightning.core.tasks.environment import EnvironmentTask

Turns = tuple[tuple[int, ...], ...]
"""The ids that the policy sampled in each turn of a rollout."""


@dataclass
class _Played:
    """A beginning of a rollout: the environment behind its last turn, and what it told."""

    environment: Any
    state: Hashable
    turn: Turn | None = None
    between: tuple[int, ...] = ()  # The ids behind the turn if the rollout goes on.


class _Player:
    """Plays the rollouts of one problem."""

    def __init__(self, policy: Policy, dialect: Dialect, prompt: Prompt) -> None:
        assert isinstance(prompt.task, EnvironmentTask)
        self.policy, self.dialect, self.task = policy, dialect, prompt.task
        environment = new_environment(self.task.environment)
        call_reset(environment, prompt.columns, 0, pictures_in(prompt.messages))
        self.begun: dict[Turns, _Played] = {(): _Played(environment, call_state(environment))}

    def after(self, turns: Turns) -> _Played:
        """What there is behind some turns."""
        if turns not in self.begun:
            self.begun[turns] = self._step(self.after(turns[:-1]), turns[-1])
        return self.begun[turns]

    def _step(self, before: _Played, ids: tuple[int, ...]) -> _Played:
        environment = copy.copy(before.environment)
        calls = tuple(self._run(environment, call) for call in self.dialect.calls(ids))
        score = call_number(environment, "score_turn") if calls else None
        text = decode(self.policy, [*ids])
        turn = watched_turn(Turn(text=text, calls=calls, state=before.state, score=score))
        state = call_state(environment) if calls else before.state
        between = tuple(self.dialect.between([call.parts for call in calls])) if calls else ()
        return _Played(environment, state, turn, between)

    def _run(self, environment: object, call: Any) -> ToolCall:
        status, result, pictures = self.task.tools.run(environment, call, self.task.limits.result_characters)
        for picture in pictures:
            assert self.policy.vision is not None
            self.policy.vision.pictures.hold(picture)
        return ToolCall(name=call.name, arguments=call.arguments, result=result, status=status, pictures=pictures)

    def episode(self, turns: Turns, end: EndReason) -> Episode:
        """The record of a rollout."""
        told = (self.after(turns[: k + 1]).turn for k in range(len(turns)))
        return Episode(turns=tuple(cast(Turn, turn) for turn in told), end=end)


def replay(policy: Policy, prompts: Sequence[Prompt], part: dict[str, Any]) -> SampledBatch:
    """The rollouts of a batch from its stored arrays; an AssertionError if the environments answer otherwise."""
    task = prompts[0].task
    assert isinstance(task, EnvironmentTask)
    pictures = None if policy.vision is None else policy.vision.pictures
    dialect = task.dialect(policy.tokenizer, policy.encode, policy.loading.chat_template_kwargs, pictures)
    players = [_Player(policy, dialect, prompt) for prompt in prompts]
    size, ends = len(part["ids"]) // len(prompts), get_args(EndReason)
    ids, sampled, numbers, episodes = [], [], [], []
    for row, (stored, turn_of, end) in enumerate(
        zip(part["ids"].tolist(), part["turn"].tolist(), part["end"].tolist(), strict=True)
    ):
        turns = turns_of(stored, turn_of)
        player = players[row // size]
        pieces = [(k, t, player.after(turns[: k + 1]).between) for k, t in enumerate(turns)]
        pieces[-1] = (*pieces[-1][:2], ())  # Nothing follows the last turn.
        ids.append([token for _, its, told in pieces for token in (*its, *told)])
        sampled.append([flag for _, its, told in pieces for flag in [True] * len(its) + [False] * len(told)])
        numbers.append([k for k, its, told in pieces for _ in (*its, *told)])
        episodes.append(player.episode(turns, ends[end]))
    encoded = [replace(p, messages=TokenText("", dialect.prompt_ids(p.messages))) for p in prompts]
    finished = [episode.end not in ("tokens", "context") for episode in episodes]
    rows = [encoded[row // size] for row in range(len(ids))]
    batch = build_batch(policy, rows, 1, ids, finished, sampled=sampled, turn=numbers)
    width = batch.response_ids.shape[1]
    valid = batch.valid_mask
    told = torch.from_numpy(part["ids"])[:, :width].long()
    assert torch.equal(without_pictures(policy, batch.response_ids).long()[valid], told[valid])
    own = [prompts[row // size] for row in range(len(ids))]
    return batch.replace(group=batch.group // size, prompts=own, episodes=episodes)


def turns_of(ids: Sequence[int], turn: Sequence[int]) -> Turns:
    """The sampled turns of a row from its ids and the numbers of their turns, −1 for ids that were not sampled."""
    pairs = [pair for pair in zip(ids, turn, strict=True) if pair[1] >= 0]
    return tuple(tuple(token for token, _ in group) for _, group in groupby(pairs, itemgetter(1)))


def without_pictures(policy: Policy, ids: Tensor) -> Tensor:
    """The ids with that of a picture's place for each picture token, whose own ids are those of a run."""
    place = 0 if policy.vision is None else policy.vision.pictures.place_id
    return ids.masked_fill(ids >= FIRST_PICTURE_ID, place)
