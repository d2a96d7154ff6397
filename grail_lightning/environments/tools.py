"""The tools of an environment class: their JSON schemas, the calls of a policy checked against them, and their results.

An environment is a class as TRL's `environment_factory` takes it. `reset` begins a rollout and gets the columns of a
row of the dataset; every other public method is a tool, but for `get_reward`, `score_turn` and `state_key`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from grail_lightning.environments.arguments import checked_arguments, shown
from grail_lightning.environments.calls import ParsedCall
from grail_lightning.environments.episode import Call, CallStatus, EpisodeLimits
from grail_lightning.environments.hooks import bound_method, listed
from grail_lightning.environments.side_by_side import awaited, side_by_side
from grail_lightning.picture import PLACE, Picture, is_image

NOT_TOOLS = frozenset({"reset", "get_reward", "score_turn", "state_key"})

MAX_PICTURES = 16  # Of one result.
MAX_PIXELS = 2**24  # Of one picture of a result.

_Ran = tuple[CallStatus, str, tuple[Picture, ...]]  # How a call ended, its result, and the pictures in it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ToolSet:
    """The tools of an environment class: TRL's methods with TRL's schemas, without `score_turn` and `state_key`.

    Raises:
        ValueError: The class has no `reset` or no tool, or a tool lacks type hints, a docstring, or parameters that
            can be given by name.
    """

    def __init__(self, environment: type) -> None:
        methods = dict(inspect.getmembers(environment, predicate=inspect.isfunction))
        if "reset" not in methods:
            raise ValueError(
                f"An environment must have a method `reset`, but `{environment.__name__}` has none. Write "
                "`def reset(self, **columns)`, which begins a rollout and returns text for the prompt, or None."
            )
        tools = [name for name in methods if name not in NOT_TOOLS and not name.startswith("_")]
        if not tools:
            raise ValueError(
                f"An environment must have a tool, but `{environment.__name__}` has no public method but "
                f"{listed(methods.keys() & NOT_TOOLS)}. Write one with type hints and a docstring."
            )
        self.schemas = [_schema(environment, name) for name in tools]  # As a chat template takes them.
        named = zip(self.schemas, tools, strict=True)
        self.show_pictures = any(_can_be_picture(s["function"].get("return", {})) for s in self.schemas)
        self.by_name = {schema["function"]["name"]: (schema, name) for schema, name in named}

    def run(self, environment: object, call: ParsedCall, max_characters: int) -> _Ran:
        """Run a call with a checked copy of its arguments; nothing is raised."""
        try:
            if call.error is not None:
                raise ValueError(call.error)
            if call.name not in self.by_name:
                raise ValueError(f"There is no tool {shown(call.name)}. The tools are: {listed(self.by_name)}.")
            schema, name = self.by_name[call.name]
            arguments = checked_arguments(schema, call.arguments)
        except ValueError as error:
            return "invalid", result_text(f"Error: {error}", max_characters), ()
        try:
            return "done", *_result(awaited(getattr(environment, name)(**arguments)), max_characters)
        except BaseException as error:  # A tool that calls `sys.exit` ends no run.
            return "failed", result_text(f"Error: {_message(error)}", max_characters), ()


def run_calls(
    rollouts: Sequence[tuple[ToolSet, object, Sequence[ParsedCall]]], limits: Sequence[EpisodeLimits]
) -> list[tuple[Call, ...]]:
    """Run the calls of many rollouts side by side: the first ones of all, then the second ones, and so on.

    Args:
        rollouts: The tools of each rollout, its environment, and what it is asked.
        limits: Those of each rollout.

    Returns:
        As many calls for each rollout as were asked, whatever the tools do. Where one has the status `timeout`, it may
        still be running: the calls behind it failed without being run, and the rollout's environment, `get_reward`
        included, must not be used again.
    """
    made: list[list[Call]] = [[] for _ in rollouts]
    for number in range(max((len(calls) for *_, calls in rollouts), default=0)):

        def run(k: int, number: int = number) -> _Ran:
            if any(call.status == "timeout" for call in made[k]):
                return "failed", "Error: it was not run, since a call before it did not return.", ()
            tools, environment, calls = rollouts[k]
            return tools.run(environment, calls[number], limits[k].result_characters)

        asked = [k for k, (*_, calls) in enumerate(rollouts) if number < len(calls)]
        outcomes = side_by_side([partial(run, k) for k in asked], [limits[k].tool_seconds for k in asked])
        for k, (_, value, seconds) in zip(asked, outcomes, strict=True):
            late: _Ran = "timeout", f"Error: the tool did not return within {seconds:g} seconds.", ()
            status, text, pictures = value or late
            name, arguments, _ = rollouts[k][2][number]
            call = Call(name=name, arguments=arguments, result=text, status=status, seconds=seconds, pictures=pictures)
            made[k].append(call)
    return [tuple(calls) for calls in made]


def _message(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:  # From its own `__str__`.
        return type(error).__name__


def _result(value: object, max_characters: int) -> tuple[str, tuple[Picture, ...]]:
    """A tool's result as text, with `PLACE` for each of its pictures, and these.

    A picture or a list with one is shown; any other value is text. The pictures are copies, on which a tool can draw
    later. A ValueError for the policy if there are too many, or one cannot be used.
    """
    parts, pictures, texts, left = value if isinstance(value, list) else [value], [], [], max_characters
    number = sum(map(is_image, parts))
    if not number:
        return result_text(value, max_characters), ()
    if number > MAX_PICTURES:
        raise ValueError(f"a result can have {MAX_PICTURES} pictures, but got {number:,}")
    for part in parts:
        if is_image(part):
            if not 0 < part.width * part.height <= MAX_PIXELS:
                raise ValueError(f"a picture can have {MAX_PIXELS:,} pixels, but got {part.width} x {part.height}")
            pictures.append(Picture(Picture(part, "a result").open(), "a result"))
            texts.append(PLACE)
        elif left >= 0:
            texts.append(result_text(part, left).replace(PLACE, f"{PLACE[0]} {PLACE[1:]}"))
            left -= len(texts[-1])
    return "".join(texts), tuple(pictures)


def result_text(value: object, max_characters: int) -> str:
    """A tool's result as text for the policy, at most `max_characters` and a note of what was cut.

    Strings stay, None is empty, bytes are decoded as UTF-8, other values are JSON if they can be, else ``str(value)``.
    Control characters other than newline and tab are removed, and lone surrogates are replaced.
    """
    if isinstance(value, bytes | bytearray):
        value = value.decode(errors="replace")
    elif value is not None and not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    text = value or ""
    note = f"… (cut: {len(text):,} characters)" if len(text) > max_characters else ""
    return _CONTROL.sub("", text[:max_characters].encode(errors="replace").decode()) + note


def _can_be_picture(schema: dict[str, Any]) -> bool:
    """Whether a value of a schema can have a picture."""
    kinds = schema.get("type", ())
    inner = [*schema.get("anyOf", ()), *schema.get("prefixItems", ()), *filter(None, [schema.get("items")])]
    return "image" in ([kinds] if isinstance(kinds, str) else kinds) or any(map(_can_be_picture, inner))


def _schema(environment: type, name: str) -> dict[str, Any]:
    """The schema that TRL gives to the chat template."""
    from transformers.utils import get_json_schema

    bound = bound_method(environment, name)
    try:
        kinds = {p.kind for p in inspect.signature(bound).parameters.values()}
        if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            raise ValueError("A parameter cannot be given by its name.")
        schema: dict[str, Any] = get_json_schema(bound)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"A tool needs a type hint for each parameter and a docstring that describes each under `Args:`, but "
            f"`{environment.__name__}.{name}` cannot be described to the policy: {reason}. Write them, or begin the "
            "name with `_` if the method is no tool."
        ) from error
    return schema
