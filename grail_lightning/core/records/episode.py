"""The records of a rollout of several turns, as text that people read, and as JSON that files keep.

A rollout is one sequence ``prompt · a_1 · o_1 · a_2 · o_2 · … · a_K``. The policy samples the turns ``a_k``; the
environment answers with the observations ``o_k``.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from grail_lightning.core.records.picture import PLACE, Picture

CallStatus = Literal["done", "invalid", "failed", "timeout"]
"""How a call ended. `invalid`: it could not be read, names no tool, or has wrong arguments; `failed`: the tool raised
an exception; `timeout`: the tool did not return within its limit."""

EndReason = Literal["answered", "turns", "tokens", "context", "failures"]
"""Why a rollout ended. `answered`: a turn ended without a call; `turns`: the last turn that is allowed called a tool;
`tokens`: the limit of sampled tokens; `context`: the limit of all tokens; `failures`: too many calls failed or timed
out. Only `tokens` and `context` truncate a rollout."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The limits of a rollout of several turns, beside `sampling.max_response_length` for its sampled tokens.

    Attributes:
        max_turns: Most turns. The calls of the last one are still run, since an environment may reward them.
        max_tokens: Most tokens after the prompt, results of tools included; None for the model's positions alone.
        max_failures: The number of calls that failed or timed out with which a rollout ends.
        tool_seconds: Most seconds of a call. A tool that hangs ends its rollout.
        method_seconds: Most seconds of `reset` with the constructor, and of each of `get_reward`, `score_turn` and
            `state_key`. One that takes longer ends the run. `close` is not waited for any longer, either.
        result_characters: Most characters of a result; the rest is cut, and the text says so.
        max_calls: Most calls of one turn. Those above are not run, and the policy is told so once.
        call_characters: Most characters of one call. A longer one is invalid.
    """

    max_turns: int = 8
    max_tokens: int | None = None
    max_failures: int = 3
    tool_seconds: float = 10.0
    method_seconds: float = 60.0
    result_characters: int = 2000
    max_calls: int = 16
    call_characters: int = 65_536

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"`limits.{name}` must be positive, but got {value}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool within a turn, with its result."""

    name: str  # The name of the tool; empty if the call could not be read.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""  # The text with which the environment answered: what the tool returned, or a message.
    status: CallStatus = "done"
    seconds: float = 0.0  # How long the tool ran. It is shown, and nothing is computed from it.
    pictures: tuple[Picture, ...] = ()  # Those of the result, whose text has `PLACE` for each.

    @property
    def parts(self) -> str | list[str | Picture]:
        """The result as a text, or as texts and pictures."""
        if not self.pictures:
            return self.result
        return [part for pair in zip_longest(self.result.split(PLACE), self.pictures) for part in pair if part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the policy, and the environment's answer to it."""

    text: str  # The sampled tokens as text, without special tokens.
    calls: tuple[ToolCall, ...] = ()  # In their order; empty if the turn is an answer.
    state: Hashable = None  # The key of the state in which the turn began, if the environment has `state_key`.
    score: float | None = None  # The environment's score of the turn, if it has `score_turn`.


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A whole rollout of several turns."""

    turns: tuple[Turn, ...]
    end: EndReason
    reward: float | None = None  # What the environment's `get_reward` returned at the end, if it has one.
    opening: str | None = None  # What its `reset` returned, which is the end of the prompt.

    @property
    def calls(self) -> list[ToolCall]:
        """All calls, in their order."""
        return [call for turn in self.turns for call in turn.calls]


def one_turn(text: str, finished: bool) -> Episode:
    """A rollout without an environment."""
    return Episode(turns=(Turn(text=text),), end="answered" if finished else "tokens")


def transcript(episode: Episode) -> str:
    """What the policy wrote and was told, in its order. Each line of it is indented, so that none can pass for ours."""
    parts = [("[reset]", episode.opening)] if episode.opening else []
    for number, turn in enumerate(episode.turns, 1):
        score = "" if turn.score is None else f", score {turn.score:.3g}"
        parts.append((f"[turn {number}{score}]", turn.text))
        parts += [(f"[{call.status} call of {call.name[:80]!r}]", call.result) for call in turn.calls]
    lines = [line for head, text in parts for line in (head, *(f"    {line}" for line in text.splitlines()))]
    reward = "" if episode.reward is None else f", reward {episode.reward:.3g}"
    return "\n".join([*lines, f"[end: {episode.end}{reward}]"]).encode(errors="replace").decode()


def episode_json(episode: Episode) -> str:
    """An episode as ASCII, for `read_episode`, without pictures and arguments that JSON cannot hold.

    States that are no number or text become texts, equal ones the same in all processes.
    """
    turns = [
        t if isinstance(t.state, str | float | int | None) else replace(t, state=_text(t.state)) for t in episode.turns
    ]
    try:
        record = asdict(replace(episode, turns=tuple(turns)))  # Which copies, and not every state can be copied.
        for call in (call for turn in record["turns"] for call in turn["calls"]):
            del call["pictures"]
        return json.dumps(record, default=_text)
    except (ValueError, TypeError, RecursionError):  # Arguments of thousands of digits, or of nested lists.
        if not any(call.arguments for call in episode.calls):
            raise
        bare = [replace(t, calls=tuple(replace(call, arguments={}) for call in t.calls)) for t in turns]
        return episode_json(replace(episode, turns=tuple(bare)))


def _text(value: object) -> str:
    """`repr`, but equal values have equal texts in all processes: members of sets stand in the order of their texts."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({{{', '.join(sorted(map(_text, value)))}}})"
    if isinstance(value, tuple):
        named = getattr(value, "_fields", None)
        if named is None:
            return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
        parts = [f"{name}={_text(part)}" for name, part in zip(named, value, strict=True)]
        return f"{type(value).__name__}({', '.join(parts)})"
    if is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__"):  # The class has no `__repr__` of its own.
        parts = [f"{part.name}={_text(getattr(value, part.name))}" for part in fields(value) if part.repr]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    return repr(value)


def read_episode(text: str) -> Episode:
    """The episode of `episode_json`; states that are no number or text are text. A ValueError for any other text."""

    def turn(fields: dict[str, Any]) -> Turn:
        state = fields["state"] if isinstance(fields["state"], str | float | int | None) else repr(fields["state"])
        return Turn(**fields | {"calls": tuple(ToolCall(**call) for call in fields["calls"]), "state": state})

    try:
        record = json.loads(text)
        episode = Episode(**record | {"turns": tuple(map(turn, record["turns"]))})
        if episode.end in get_args(EndReason) and {call.status for call in episode.calls} <= {*get_args(CallStatus)}:
            return episode
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(f"`episode` must be JSON as `KeepRollouts` writes it, but got {text[:60]!a}. Give the whole file.")
