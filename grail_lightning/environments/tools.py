"""The tools of an environment class: their JSON schemas, the calls of a policy checked against them, and their results.

An environment is a class as TRL's `environment_factory` takes it. `reset` begins a rollout and gets the columns of a
row of the dataset; every other public method is a tool, but for `get_reward`, `score_turn` and `state_key`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grail_lightning.environments.arguments import checked_arguments, shown
from grail_lightning.environments.calls import ParsedCall
from grail_lightning.environments.episode import Call, CallStatus
from grail_lightning.environments.hooks import bound_method, listed
from grail_lightning.environments.side_by_side import awaited, side_by_side

NOT_TOOLS = frozenset({"reset", "get_reward", "score_turn", "state_key"})

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class ToolSet:
    """The tools of an environment class: TRL's methods with TRL's schemas, without `score_turn` and `state_key`.

    Args:
        environment: The class, or an instance of it.

    Raises:
        ValueError: The class has no `reset` or no tool, or a tool lacks type hints, a docstring, or parameters that
            can be given by name.
    """

    def __init__(self, environment: object) -> None:
        made = environment if isinstance(environment, type) else type(environment)
        methods = dict(inspect.getmembers(made, predicate=inspect.isfunction))
        if "reset" not in methods:
            raise ValueError(
                f"An environment must have a method `reset`, but `{made.__name__}` has none. Write "
                "`def reset(self, **columns)`, which begins a rollout and returns text for the prompt, or None."
            )
        tools = [name for name in methods if name not in NOT_TOOLS and not name.startswith("_")]
        if not tools:
            raise ValueError(
                f"An environment must have a tool, but `{made.__name__}` has no public method but "
                f"{listed(methods.keys() & NOT_TOOLS)}. Write one with type hints and a docstring."
            )
        self.schemas = [_schema(made, name) for name in tools]  # As a chat template takes them.
        self._by_name = {
            schema["function"]["name"]: (name, schema) for name, schema in zip(tools, self.schemas, strict=True)
        }

    @property
    def names(self) -> list[str]:
        """The names under which the policy knows the tools."""
        return list(self._by_name)

    def bound(self, environment: object, call: ParsedCall) -> Callable[[], Any]:
        """The call as a function, with a checked copy of its arguments (see `checked_arguments`).

        Raises:
            ValueError: The call could not be read, names no tool, or has wrong arguments. The policy reads the message.
        """
        if call.error is not None:
            raise ValueError(call.error)
        if call.name not in self._by_name:
            raise ValueError(f"There is no tool {shown(call.name)}. The tools are: {listed(self.names)}.")
        name, schema = self._by_name[call.name]
        return partial(getattr(environment, name), **checked_arguments(schema, call.arguments))


def run_calls(
    tools: ToolSet,
    rollouts: Sequence[tuple[object, Sequence[ParsedCall]]],
    *,
    seconds: float,
    max_characters: int,
    threads: int = 32,
) -> list[tuple[Call, ...]]:
    """Run the calls of many rollouts side by side, those of a rollout one after the other.

    Args:
        tools: The tools of the environments' class.
        rollouts: The environment of each rollout, and what it is asked.
        seconds: Most that a call may take.
        max_characters: Longest text of a result; see `result_text`.
        threads: Most rollouts at a time.

    Returns:
        As many calls for each rollout as were asked, whatever the tools do. Where one has the status `timeout`, it may
        still be running: the calls behind it failed without being run, and the rollout's environment, `get_reward`
        included, must not be used again.
    """
    jobs: list[list[Callable[[], tuple[CallStatus, str]]]] = [
        [_step(tools, environment, call, max_characters) for call in calls] for environment, calls in rollouts
    ]
    late: tuple[CallStatus, str] = ("timeout", f"Error: the tool did not return within {seconds:g} seconds.")
    lost: tuple[CallStatus, str] = ("failed", "Error: it was not run, since a call before it did not return.")
    made = []
    for (_, calls), ended in zip(rollouts, side_by_side(jobs, seconds=seconds, threads=threads), strict=True):
        results = [(outcome.value or late, outcome.seconds) for outcome in ended]
        results += [(lost, 0.0)] * (len(calls) - len(ended))
        made.append(
            tuple(
                Call(name=call.name, arguments=call.arguments, result=text, status=status, seconds=took)
                for call, ((status, text), took) in zip(calls, results, strict=True)
            )
        )
    return made


def _step(tools: ToolSet, environment: object, call: ParsedCall, most: int) -> Callable[[], tuple[CallStatus, str]]:
    """The call as a function that raises nothing. It holds whatever may take long: the text of the result, too."""

    def run() -> tuple[CallStatus, str]:
        try:
            tool = tools.bound(environment, call)
        except ValueError as error:
            return "invalid", result_text(f"Error: {error}", most)
        try:
            return "done", result_text(awaited(tool()), most)
        except BaseException as error:  # A tool that calls `sys.exit` ends no run.
            return "failed", result_text(f"Error: {_message(error)}", most)

    return run


def _message(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:  # From its own `__str__`.
        return type(error).__name__


def result_text(value: object, max_characters: int) -> str:
    """A tool's result as text for the policy, at most `max_characters` and a note of what was cut.

    Strings stay, None is empty, bytes are decoded as UTF-8, other values are JSON if they can be, else ``str(value)``.
    Control characters other than newline and tab are removed; lone surrogates and undecodable bytes become U+FFFD.
    """
    if value is None:
        return ""
    whole = True
    if isinstance(value, str):
        text = value
    elif isinstance(value, bytes | bytearray):
        enough = 4 * (max_characters + 1)  # A character has at most 4 bytes.
        text, whole = value[:enough].decode(errors="replace"), len(value) <= enough
    else:
        try:
            text = _json(value, max_characters)
            whole = len(text) <= max_characters
        except (TypeError, ValueError, RecursionError):
            text = str(value)
    note = ""
    if len(text) > max_characters:
        note = f"… (cut: {f'{len(text):,}' if whole else f'more than {max_characters:,}'} characters)"
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text[:max_characters])) + note


def _json(value: object, enough: int) -> str:
    """JSON, or a beginning of it that has more than `enough` characters."""
    parts, length = [], 0
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        parts.append(part)
        length += len(part)
        if length > enough:
            break
    return "".join(parts)


def _schema(made: type, name: str) -> dict[str, Any]:
    """The schema that TRL gives to the chat template."""
    from transformers.utils import get_json_schema

    bound = bound_method(made, name)
    try:
        kinds = {p.kind for p in inspect.signature(bound).parameters.values()}
        if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            raise ValueError("A parameter cannot be given by its name.")
        schema: dict[str, Any] = get_json_schema(bound)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"A tool needs a type hint for each parameter and a docstring that describes each under `Args:`, but "
            f"`{made.__name__}.{name}` cannot be described to the policy: {reason}. Write them, or begin the name with "
            "`_` if the method is no tool."
        ) from error
    return schema
