"""Rollouts of several turns with given tokens, states and scores; what the environment answered is not sampled."""

from typing import NamedTuple

import torch

from grail_lightning import Prompt
from grail_lightning.core.records.episode import Episode, ToolCall, Turn
from tests.batches import of_ids, rollouts
from tests.core.credit.rollouts import Labelled


class Row(NamedTuple):
    """A rollout: the sampled ids of each turn, the ids of the answers to all but the last, and what is known of it."""

    reward: float
    sampled: list
    answered: list = []  # noqa: RUF012
    states: list = []  # noqa: RUF012
    scores: list = []  # noqa: RUF012


def _at(values, k):
    return values[k] if k < len(values) else None


def _episode(row):
    turns = []
    for k, ids in enumerate(row.sampled):
        calls = (ToolCall(name="look", result=f"seen {k}"),) if k < len(row.answered) else ()
        turns.append(Turn(text=f"turn {ids}", calls=calls, state=_at(row.states, k), score=_at(row.scores, k)))
    return Episode(turns=tuple(turns), end="answered")


def played(*groups, references=None):
    """Groups of equally many rows as a batch; the prompt of group ``g`` is the ids ``20 + g, 30, 31``."""
    size, rows = len(groups[0]), [row for group in groups for row in group]
    tokens = []  # Of each row: id, number of the turn, whether it was sampled.
    for row in rows:
        parts = []
        for k, ids in enumerate(row.sampled):
            parts += [(i, k, True) for i in ids] + [(i, k, False) for i in _at(row.answered, k) or []]
        tokens.append(list(map(list, zip(*parts, strict=True))) or [[], [], []])
    ids, turn, mask = zip(*tokens, strict=True)
    group = torch.arange(len(groups)).repeat_interleave(size)
    begun = [[20 + g, 30, 31] for g in group.tolist()]
    references = references or ["7"] * len(groups)
    sampled = of_ids(
        begun,
        ids,
        response_mask=of_ids(begun, mask).response_ids.bool(),
        group=group,
        row=torch.arange(len(rows)) + 40,
        prompts=[Prompt(messages=f"Problem {g}?", reference=references[g], task=Labelled()) for g in group.tolist()],
        turn=of_ids(begun, turn).response_ids.long(),
        episodes=[_episode(row) for row in rows],
    )
    return rollouts(sampled, torch.tensor([row.reward for row in rows]), group_size=size)


def flat(rows):
    """The values of all rows, one after another."""
    return [value for row in rows for value in row]


def by_turn(batch, tensor):
    """The value that the sampled tokens of each turn have, row by row; and nothing elsewhere."""
    assert (tensor[~batch.response_mask] == 0).all()
    found = []
    for row, mask, turn in zip(tensor.tolist(), batch.response_mask.tolist(), batch.turn.tolist(), strict=True):
        values = {}
        for value, sampled, number in zip(row, mask, turn, strict=True):
            if sampled:
                values.setdefault(number, set()).add(value)
        assert all(len(several) == 1 for several in values.values()), "one value a turn"
        found.append([values[number].pop() for number in sorted(values)])
    return found
