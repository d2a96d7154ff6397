"""The labels of a world's stored rollouts: kinds of steps, scores of turns, and resampled values of states.

They are read when all weights of a method are there, and are gone before the next method runs.

Shapes: ``R`` rows of all batches, ``B`` of one, ``T`` response tokens, ``S`` lines. A line is a step of a chain, a
statement of a program, or a turn.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, OpenWorld
from grail_lightning.app.benchmark.stored import read_arrays
from grail_lightning.app.benchmark.worlds import BAD_TURN, ERRORS, World
from grail_lightning.core.credit.oar import scoped_tokens
from grail_lightning.core.credit.turns import turn_table
from grail_lightning.core.functional.advantages import group_advantages, spread_turns, sum_by_turn, turn_starts
from grail_lightning.core.records.task import Step, StepKind
from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch

_KINDS: tuple[StepKind, ...] = get_args(StepKind)
_START, _STOP, _KIND, _RESULT, _FIRST, _LAST = 0, 1, 2, 3, 5, 6  # Columns of the array `steps`.
_ALIVE: WeakSet[Labels] = WeakSet()

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Forks:
    """``M`` pairs of wrong rollouts that are equal up to a token; from there one errs, and the other's line is sound.

    Attributes:
        row: ``[2, M]``, the flawed rollouts and the sound ones.
        line: ``[M]``, the line of the token in both.
        token: ``[M]``, the first token in which they differ.
    """

    row: Array
    line: Array
    token: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """What is known of the rollouts of a world.

    Attributes:
        world: The world.
        wrong: ``[R]`` bool, wrong rollouts of groups with both outcomes; where answers are boxed, those with a box.
        right: ``[R]`` bool, the same of right ones.
        begin: ``[R, S]``, the first token of each line in which an error is, or would be, visible.
        stop: ``[R, S]``, the index behind the last such token; equal to `begin` where there is no line.
        kind: ``[R, S]`` bool by kind. A line that is no equation keeps its place and has no kind.
        kinds: ``[R, T]`` bool: tokens by the kind of their line in front of the answer, and those of the answer.
        gains: ``[2, R, S]``: by how much each line changes the value of the state, by the two halves of the values.
        forks: By kind of error.
        arrays: The arrays of labels in the file.
    """

    world: World
    wrong: Array
    right: Array
    begin: Array
    stop: Array
    kind: dict[str, Array]
    kinds: dict[str, Array]
    gains: Array
    forks: dict[str, Forks]
    arrays: dict[str, Array]

    def __post_init__(self) -> None:
        _ALIVE.add(self)

    @property
    def known(self) -> Array:
        """``[R, S]`` bool: lines that are there."""
        return self.begin < self.stop

    @property
    def earned(self) -> Array:
        """``[R, S]``: the gain of each line in the direction of the outcome; in wrong rollouts the loss."""
        earned: Array = self.gains.mean(0) * np.where(self.right, 1.0, -1.0)[:, None]
        return earned

    def steps(self, row: int) -> list[Step] | None:
        """The labelled steps of a row; None where there are none."""
        if "steps" not in self.arrays:
            return None
        batch, place = divmod(row, self.arrays["steps"].shape[1])
        number = int(self.arrays["num_steps"][batch, place])
        if number < 0:
            return None
        rows = self.arrays["steps"][batch, place, :number].tolist()
        results = [None if row[_RESULT] < 0 else (row[_RESULT], row[_RESULT + 1]) for row in rows]
        return [
            Step(start=row[_START], stop=row[_STOP], kind=_KINDS[row[_KIND]], result=result)
            for row, result in zip(rows, results, strict=True)
        ]

    def q_and_v(
        self, half: int, number: int, batch: GradedBatch, baseline: str = "value", shift: int = 0
    ) -> tuple[Tensor, Tensor]:
        """``[B, T]`` each: Q and V of each token of a batch by a half of the values; or another baseline for V."""
        return q_and_v(self.arrays, half, number + shift, batch, baseline)


def check_labels_absent() -> None:
    """Check that no labels are in memory, where a method could find them."""
    gc.collect()
    if len(_ALIVE):
        raise RuntimeError("Labels must not be read before the weights of a method are there. Delete them first.")


def read_labels(opened: OpenWorld) -> Labels:
    """The labels of the rollouts of an open world. Raises the audit event ``grail_lightning.labels``."""
    number, world = len(opened.batches), opened.world
    names = ("score",) if world.turns else ("steps", "num_steps")
    arrays = read_arrays(world.file, (*names, "value", "best"), number)
    parts = [
        (_turns if world.turns else _steps)(batch, {name: array[k] for name, array in arrays.items()}, world)
        for k, batch in enumerate(opened.batches)
    ]
    advantages = torch.cat([group_advantages(batch.rewards, GROUP_SIZE) for batch in opened.batches]).numpy()
    boxed = torch.cat([batch.answer.whole.any(1) | world.programs for batch in opened.batches]).numpy()
    begin, stop = (_joined([part[name] for part in parts], 0) for name in ("begin", "stop"))
    kind = {name: _joined([part["kind"][name] for part in parts], 0) for name in parts[0]["kind"]}
    kinds = {name: _joined([part["kinds"][name] for part in parts], 0) for name in parts[0]["kinds"]}
    gains = [_gains(arrays, k, batch, part) for k, (batch, part) in enumerate(zip(opened.batches, parts, strict=True))]
    wrong = boxed & (advantages < 0)
    ids = [row for batch in opened.batches for row in batch.response_ids.tolist()]
    known = begin < stop
    return Labels(
        world=world,
        wrong=wrong,
        right=boxed & (advantages > 0),
        begin=begin,
        stop=stop,
        kind=kind,
        kinds=kinds,
        gains=np.stack([_joined([g[half] for g in gains], np.nan) for half in (0, 1)]),
        forks={error: _forks(ids, begin, kind, wrong[:, None] & known, error) for error in world.errors},
        arrays=arrays,
    )


def _steps(batch: GradedBatch, arrays: dict[str, Array], world: World) -> dict[str, Any]:
    """The lines of a batch of one turn: of chains their results, of programs their statements."""
    steps, number = arrays["steps"].astype(np.int64), arrays["num_steps"]
    width, places = batch.response_mask.shape[1], np.arange(steps.shape[1])
    end = torch.where(batch.answer.whole, torch.arange(width), width).amin(1).numpy()
    if world.programs:
        end = np.full_like(end, width)
    there = (places < number[:, None]) & (steps[..., _LAST] > steps[..., _FIRST]) & (steps[..., _LAST] <= end[:, None])
    line = there & (steps[..., _KIND] != _KINDS.index("filler"))
    labelled = line & (world.programs | (steps[..., _RESULT] >= 0))
    # Lines keep their numbers, without those that are none.
    order = np.argsort(~line, axis=1, kind="stable")
    ordered = {"begin": np.where(labelled, steps[..., _FIRST], 0), "stop": np.where(labelled, steps[..., _LAST], 0)}
    # The token behind a result belongs to it, since "1" may still become "12".
    if not world.programs:
        ordered["after"] = np.where(labelled, steps[..., _LAST] + 1, 0)
    ordered |= {name: labelled & (steps[..., _KIND] == _KINDS.index(name)) for name in (*_LABELLED,)}
    moved = {name: np.take_along_axis(part, order, 1) for name, part in ordered.items()}
    columns = np.arange(width)
    inside = (columns >= steps[..., _FIRST, None]) & (columns < steps[..., _LAST, None])
    reasoning = (batch.response_mask if world.programs else scoped_tokens(_ready(batch), "reasoning")).numpy()
    exists = (places < number[:, None])[..., None]

    def tokens(*names: str) -> Array:
        chosen = np.isin(steps[..., _KIND], [_KINDS.index(name) for name in names])[..., None]
        return (inside & exists & chosen).any(1) & reasoning

    kinds = {"flawed": tokens(*ERRORS), "sound": tokens("sound")}
    if not world.programs:
        kinds |= {"inherited": tokens("inherited"), "filler": tokens("filler")}
    kinds["answer"] = (batch.answer.content & ~batch.answer.marker).numpy()
    return {
        "begin": moved["begin"],
        "stop": moved["stop"],
        "after": moved.get("after", moved["stop"]),
        "kind": {name: moved[name] for name in _LABELLED},
        "kinds": kinds,
    }


def _ready(batch: GradedBatch) -> RolloutBatch:
    """The batch as functions of credit methods take it, without advantages."""
    return batch.with_advantages(torch.zeros(len(batch)))


_LABELLED = ("sound", *ERRORS, "inherited")


def _turns(batch: GradedBatch, arrays: dict[str, Array], world: World) -> dict[str, Any]:
    """The turns of a batch. A call is sound if the environment scores it above 0; an answer has no kind."""
    turns = turn_table(_ready(batch))
    number = turns.exists.shape[1]
    score = torch.from_numpy(arrays["score"][:, :number]).float()
    begin = turn_starts(turns.numbers, number)
    stop = begin + sum_by_turn(batch.response_mask.long(), turns.numbers, number)
    kind = {BAD_TURN: score <= 0, "sound": score > 0}
    masks = {name: spread_turns(flags.long(), turns.numbers).bool() for name, flags in kind.items()}
    answer = batch.response_mask & ~masks[BAD_TURN] & ~masks["sound"]
    return {
        "begin": begin.numpy(),
        "stop": stop.numpy(),
        "after": stop.numpy(),
        "kind": {name: flags.numpy() for name, flags in kind.items()},
        "kinds": {"flawed": masks[BAD_TURN].numpy(), "sound": masks["sound"].numpy(), "answer": answer.numpy()},
    }


def _joined(parts: Sequence[Array], fill: float) -> Array:
    """Tables ``[B, ·]`` of batches as one, padded to a common width."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=fill) for p in parts])


def _forks(ids: list[list[int]], begin: Array, kind: dict[str, Array], chosen: Array, error: str) -> Forks:
    """The forks at which a line with this error and a sound one follow the same tokens of the same prompt."""
    after: dict[tuple[int, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name in (error, "sound"):
        for b, s in np.argwhere(chosen & kind[name]).tolist():
            after[b // GROUP_SIZE, s, *ids[b][: begin[b, s]]][name].append(b)
    pairs = []
    for (_, s, *_), by_kind in after.items():
        for i in by_kind[error]:
            for j in by_kind["sound"]:
                parting = next(t for t, (x, y) in enumerate(zip(ids[i], ids[j], strict=False)) if x != y)
                pairs.append((i, j, s, parting))
    flawed, sound, line, token = np.array(pairs, dtype=np.int64).reshape(-1, 4).T
    return Forks(row=np.stack([flawed, sound]), line=line, token=token)


# --- values -----------------------------------------------------------------------------------------------------------


def q_and_v(
    arrays: dict[str, Array], half: int, number: int, batch: GradedBatch, baseline: str = "value"
) -> tuple[Tensor, Tensor]:
    """``[B, T]`` each: Q and V of each token of a batch by a half of the values; or another baseline for V.

    A token that was no choice leaves the value as it is: it takes that of the next choice, and its Q is the next V.
    """
    width = batch.response_mask.shape[1]
    value, before = (torch.from_numpy(arrays[name][number, :, :width, half]).float() for name in ("value", baseline))
    after = torch.empty_like(value)
    q = batch.rewards.clone().float()
    for t in range(width - 1, -1, -1):
        after[:, t] = q
        q = torch.where(value[:, t].isnan(), q, value[:, t])
    before = torch.where(before.isnan(), after, before)
    if batch.turn is None:
        return after, before
    turns = turn_table(_ready(batch))
    places = turn_starts(turns.numbers, turns.exists.shape[1]).clamp(max=width - 1)
    first, then = (spread_turns(x.gather(1, places), turns.numbers) for x in (after, before))
    return first, then


def _gains(arrays: dict[str, Array], number: int, batch: GradedBatch, lines: dict[str, Any]) -> list[Array]:
    """``[B, S]`` twice: by how much each line changes the value, the sum of ``Q - V`` over its tokens, by half.

    NaN where there is no line.
    """
    begin, after = (torch.from_numpy(lines[name]) for name in ("begin", "after"))
    gains = []
    for half in (0, 1):
        q, v = q_and_v(arrays, half, number, batch)
        if batch.turn is None:
            change = pad(((q - v) * batch.response_mask).cumsum(1), (1, 0))
            width = change.shape[1] - 1
            gain = change.gather(1, after.clamp(max=width)) - change.gather(1, begin)
        else:
            gain = (q - v).gather(1, begin.clamp(max=q.shape[1] - 1))
        gains.append(gain.masked_fill(torch.from_numpy(lines["begin"] >= lines["stop"]), torch.nan).numpy())
    return gains
