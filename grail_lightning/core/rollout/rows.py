"""Rollouts as rows: the values of the columns that a batch has, for files and for people. Model text is untrusted.

Shapes: ``B`` rows (rollouts), ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from grail_lightning.core.records.episode import Episode, episode_json, transcript
from grail_lightning.core.records.picture import as_text
from grail_lightning.core.records.task import Prompt, problem_id
from grail_lightning.core.rollout.batch import GradedBatch, SampledBatch


def rows_of(batch: GradedBatch, names: Iterable[str], advantages: Tensor | None = None) -> dict[str, list[Any]]:
    """The columns of a batch by name, ``B`` values each: those of `names` that a batch has.

    Columns of turns are left out if no rollout of the batch has turns. `advantages` are ``[B]``; the column `advantage`
    is null without them.
    """
    values = _VALUES if batch.turn is None else _VALUES | _VALUES_OF_TURNS
    rows = {name: values[name](batch) for name in names if name in values}
    return rows if advantages is None or "advantage" not in rows else rows | {"advantage": advantages.tolist()}


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: plain text as it is, a conversation as ``role: content`` lines."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    return "\n".join(f"{message.get('role', '')}: {as_text(message.get('content', ''))}" for message in prompt.messages)


def response_text(batch: SampledBatch, row: int) -> str:
    """A response as people read it: in an environment with all turns and what it told, else as it is."""
    if batch.episodes is None or not batch.in_environment[row]:
        return batch.texts[row]
    return transcript(batch.episodes[row])


def _rewards(batch: GradedBatch) -> list[float | None]:
    pairs = zip(batch.rewards.tolist(), batch.scored.tolist(), strict=True)
    return [reward if scored else None for reward, scored in pairs]


def _masked(values: Tensor, mask: Tensor) -> list[list[int]]:
    """The values ``[B, W]`` of each row where the mask ``[B, W]`` is True."""
    return [row[row_mask].tolist() for row, row_mask in zip(values.cpu(), mask.cpu(), strict=True)]


def _turns(batch: GradedBatch) -> list[list[int]]:
    assert batch.turn is not None
    return _masked(batch.turn.masked_fill(~batch.response_mask, -1), batch.valid_mask)


def _prompt_ids(batch: GradedBatch) -> list[list[int]]:
    width = batch.prompt_width
    return _masked(batch.input_ids[:, :width], batch.attention_mask[:, :width])


def _of_episodes(value: Callable[[Episode], object]) -> Callable[[GradedBatch], list[Any]]:
    return lambda batch: [None] * len(batch) if batch.episodes is None else list(map(value, batch.episodes))


_VALUES: dict[str, Callable[[GradedBatch], list[Any]]] = {
    "dataset": lambda batch: [prompt.dataset for prompt in batch.prompts],
    "problem": lambda batch: [problem_id(prompt) for prompt in batch.prompts],
    "prompt": lambda batch: [prompt_text(prompt) for prompt in batch.prompts],
    "reference": lambda batch: [prompt.reference for prompt in batch.prompts],
    "response": lambda batch: list(batch.texts),
    "prediction": lambda batch: [None if v.status == "missing" else v.prediction for v in batch.verdicts],
    "correct": lambda batch: batch.correct.tolist(),
    "status": lambda batch: [verdict.status for verdict in batch.verdicts],
    "layer": lambda batch: [verdict.layer for verdict in batch.verdicts],
    "reward": _rewards,
    "advantage": lambda batch: [None] * len(batch),
    "finished": lambda batch: batch.finished.tolist(),
    "num_tokens": lambda batch: batch.response_lengths.tolist(),
    "group": lambda batch: batch.group.tolist(),
    "token_ids": lambda batch: _masked(batch.response_ids, batch.valid_mask),
    "messages": lambda batch: [prompt.messages for prompt in batch.prompts],
    "columns": lambda batch: [prompt.columns for prompt in batch.prompts],
}
_VALUES_OF_TURNS: dict[str, Callable[[GradedBatch], list[Any]]] = {
    "num_turns": _of_episodes(lambda episode: len(episode.turns)),
    "num_calls": _of_episodes(lambda episode: len(episode.calls)),
    "num_invalid_calls": _of_episodes(lambda episode: sum(call.status == "invalid" for call in episode.calls)),
    "end": _of_episodes(lambda episode: episode.end),
    "transcript": _of_episodes(transcript),
    "turns": _turns,
    "prompt_ids": _prompt_ids,
    "episode": _of_episodes(episode_json),
}
