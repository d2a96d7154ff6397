"""Rollouts of several turns as text that people read, and as JSON that files keep."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, get_args

from grail_lightning.environments.episode import Call, CallStatus, EndReason, Episode, Turn


def episode_columns(episode: Episode) -> dict[str, Any]:
    """What files say of an episode: `num_turns`, `num_calls`, `num_invalid_calls`, `end`, `transcript`."""
    invalid = sum(call.status == "invalid" for call in episode.calls)
    numbers = {"num_turns": len(episode.turns), "num_calls": len(episode.calls), "num_invalid_calls": invalid}
    return {**numbers, "end": episode.end, "transcript": transcript(episode)}


def transcript(episode: Episode) -> str:
    """What the policy wrote and was told, in its order. Each line of it is indented, so that none can pass for ours."""
    parts = []
    for number, turn in enumerate(episode.turns, 1):
        score = "" if turn.score is None else f", score {turn.score:.3g}"
        parts.append((f"[turn {number}{score}]", turn.text))
        parts += [(f"[{call.status} call of {call.name[:80]!r}]", call.result) for call in turn.calls]
    lines = [line for head, text in parts for line in (head, *(f"    {line}" for line in text.splitlines()))]
    reward = "" if episode.reward is None else f", reward {episode.reward:.3g}"
    return "\n".join([*lines, f"[end: {episode.end}{reward}]"]).encode(errors="replace").decode()


def episode_json(episode: Episode) -> str:
    """An episode as ASCII, for `read_episode`, without pictures and arguments that JSON cannot hold."""
    try:
        return _written(episode)
    except (ValueError, TypeError, RecursionError):  # Thousands of digits, or of nested lists.
        turns = (replace(t, calls=tuple(replace(call, arguments={}) for call in t.calls)) for t in episode.turns)
        return _written(replace(episode, turns=tuple(turns)))


def _written(episode: Episode) -> str:
    found = asdict(episode)
    for call in (call for turn in found["turns"] for call in turn["calls"]):
        del call["pictures"]
    return json.dumps(found, default=repr)


def read_episode(text: str) -> Episode:
    """The episode of `episode_json`; states that are no number or text are text. A ValueError for any other text."""

    def turn(found: dict[str, Any]) -> Turn:
        state = found["state"] if isinstance(found["state"], str | float | int | None) else repr(found["state"])
        return Turn(**found | {"calls": tuple(Call(**call) for call in found["calls"]), "state": state})

    try:
        found = json.loads(text)
        episode = Episode(**found | {"turns": tuple(map(turn, found["turns"]))})
        if episode.end in get_args(EndReason) and {call.status for call in episode.calls} <= {*get_args(CallStatus)}:
            return episode
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(f"`episode` must be JSON as `KeepRollouts` writes it, but got {text[:60]!a}. Give the whole file.")
