"""Reading of the calls in what a policy wrote, and the check of their arguments against what the policy was told.

It is untrusted text. Nothing in it is evaluated, and the time grows linearly with it. A call that cannot be read has an
`error`, which is a text for the policy.
"""

from __future__ import annotations

import copy
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class CallLimits(NamedTuple):
    """How much is read of what a policy wrote."""

    calls: int = 16  # Of one turn; what goes beyond is one more call with an error.
    characters: int = 65_536  # Of one call.


LIMITS = CallLimits()
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_LLAMA3 = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:'
)
_HERMES_FORM = '<tool_call>{"name": …, "arguments": {…}}</tool_call>'
_LLAMA3_FORM = '{"name": …, "parameters": {…}}'


class ParsedCall(NamedTuple):
    """A call as it was read from the policy's text."""

    name: str
    arguments: Mapping[str, Any] = {}  # Values as JSON has them.
    error: str | None = None  # Why the call could not be read; goes back to the policy.


def hermes_calls(text: str, limits: CallLimits = LIMITS) -> list[ParsedCall]:
    """The calls ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` of a turn, in their order.

    What stands in a block ``<think>…</think>`` is no call, and neither is what follows a ``<think>`` without an end:
    there a policy weighs what it could call.
    """
    calls = []
    for piece in _THINKING.sub("", text).split("<tool_call>", limits.calls + 1)[1:]:
        body, end, _ = piece.partition("</tool_call>")
        unread = _unreadable("it has no </tool_call>", _HERMES_FORM)
        calls.append(_read(body, _HERMES_FORM, limits) if end else unread)
    return _capped(calls, limits)


def llama3_calls(text: str, limits: CallLimits = LIMITS) -> list[ParsedCall]:
    """The calls ``{"name": …, "parameters": {…}}`` of a turn, with or without ``<|python_tag|>`` in front.

    Other JSON is no call, unless it follows that tag. Thinking is passed over as in `hermes_calls`.
    """
    before, tag, behind = _THINKING.sub("", text).partition("<|python_tag|>")
    calls: list[ParsedCall] = []
    text, end = behind if tag else before, 0
    for match in _LLAMA3.finditer(text):
        if match.start() < end:
            continue  # It stands in the arguments of the call before.
        if len(calls) > limits.calls:
            break
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            calls.append(_unreadable(_reason(error), _LLAMA3_FORM))
            break  # Where the next one begins is not known.
        calls.append(_call_of(value, _LLAMA3_FORM, limits, end - match.start()))
    if tag and not calls:
        return [_unreadable("no JSON object with a name follows <|python_tag|>", _LLAMA3_FORM)]
    return _capped(calls, limits)


def tag_calls(
    text: str,
    parameters: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    limits: CallLimits = LIMITS,
) -> list[ParsedCall]:
    """The call ``<name>…</name>`` that ends a turn, or none; `parameters` are the names of each tool's.

    The content is the value of the one parameter, as text; of several, a JSON object. Without content a tool of
    `optional` has its defaults. A call counts wherever it stands, in a block of thinking too, because its closing tag
    has ended the turn.
    """
    ends = [(text.find(f"</{name}>"), name) for name in parameters]
    end, name = min((place for place in ends if place[0] >= 0), default=(-1, ""))
    if end < 0:
        visible_text = _THINKING.sub("", text)
        opened = [name for name in parameters if f"<{name}>" in visible_text]
        return [ParsedCall(name, error=f"This call has no </{name}>.") for name in opened[:1]]
    _, tag, content = text[:end].rpartition(f"<{name}>")
    if not tag:
        return [ParsedCall(name, error=f"This call has no <{name}> before its </{name}>.")]
    content, names = content.strip(), parameters[name]
    if not content and name in optional:
        return [ParsedCall(name)]
    if len(names) == 1:
        value = {"name": name, "arguments": {names[0]: content}}
        return [_call_of(value, tag_form(name, names), limits, len(content))]
    return [_read(content, tag_form(name, names), limits, name)] if names else [ParsedCall(name)]


def calls_by(parse: Callable[[str], dict[str, Any]], text: str, limits: CallLimits = LIMITS) -> list[ParsedCall]:
    """The calls of a turn by a tokenizer's own parser, which is not made for hostile text."""
    try:
        if len(text) > limits.characters * limits.calls:
            raise ValueError("it is too long")
        calls = [call["function"] for call in parse(text).get("tool_calls") or []]
    except Exception as error:  # Of its regular expressions, of JSON, or of the shape of what it made.
        return [ParsedCall("", error=f"The calls of this turn could not be read: {str(error)[:100]}")]
    return _capped([_call_of(call, "a name and arguments", limits) for call in calls], limits)


def tag_form(name: str, parameters: Sequence[str]) -> str:
    """How a call in tags is written."""
    several = "{" + ", ".join(f'"{parameter}": …' for parameter in parameters) + "}"
    return f"<{name}>{several if len(parameters) > 1 else '…' if parameters else ''}</{name}>"


def _call_of(value: Any, form: str, limits: CallLimits, length: int | None = None) -> ParsedCall:
    """The call that was read from a text of this length; None for the length that it has as JSON."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _unreadable("it has no name", form)
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        # What other programs could not write again: lone surrogates, NaN, integers of thousands of digits.
        written = json.dumps([name, arguments], ensure_ascii=False, allow_nan=False)
        written.encode()
        if (len(written) if length is None else length) > limits.characters:
            raise ValueError(f"it has more than {limits.characters:,} characters")
    except (ValueError, TypeError, RecursionError) as error:
        return _unreadable(_reason(error), form)
    if not isinstance(arguments, dict):
        return ParsedCall(name, error=f"The arguments of a call must be a JSON object. Write {form}.")
    return ParsedCall(name, arguments)


def _read(text: str, form: str, limits: CallLimits, name: str | None = None) -> ParsedCall:
    """The call of a text in JSON: of the whole call, or of the arguments of the tool `name`."""
    try:
        if len(text) > limits.characters:
            raise ValueError(f"it has more than {limits.characters:,} characters")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _unreadable(_reason(error), form, name or "")
    return _call_of(value if name is None else {"name": name, "arguments": value}, form, limits, len(text))


def _capped(calls: list[ParsedCall], limits: CallLimits) -> list[ParsedCall]:
    more = ParsedCall("", error=f"Only the first {limits.calls} calls of a turn are run.")
    return [*calls[: limits.calls], more] if len(calls) > limits.calls else calls


def _unreadable(reason: str, form: str, name: str = "") -> ParsedCall:
    return ParsedCall(name, error=f"This call could not be read: {reason}. Write {form}.")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]


def checked_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a call's arguments, checked against a tool's schema. A ValueError has a message for the policy.

    A value that fits stays as it is, as in TRL. One that does not is converted if nothing is lost: ``"3"`` and ``3.0``
    to 3, ``3`` to ``"3"``, ``"true"`` to True, ``"[1]"`` to ``[1]``. What is in lists and objects is not looked at.
    """
    function = schema["function"]
    properties, required = function["parameters"]["properties"], function["parameters"].get("required", ())
    wrong = [f"{shown(name)} is not a parameter" for name in arguments if name not in properties][:3]
    wrong += [f"`{name}` is missing" for name in required if name not in arguments]
    checked = {}
    for name in [name for name in arguments if name in properties]:
        try:
            fitting = (value for value in _readings(arguments[name]) if _fits(value, properties[name]))
            checked[name] = copy.deepcopy(next(fitting))
        except (StopIteration, ValueError, RecursionError):
            wrong.append(f"`{name}` must be {_kind(properties[name])}, but got {shown(arguments[name])}")
    if wrong:
        form = parameter_forms(schema).values()
        raise ValueError(f"{'; '.join(wrong)}. The tool is `{function['name']}({', '.join(form)})`.")
    return checked


def parameter_forms(schema: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a tool by their names, in words: ``times: integer (optional)``."""
    parameters = schema["function"]["parameters"]
    required = parameters.get("required", ())
    return {
        name: f"{name}: {_kind(form)}{'' if name in required else ' (optional)'}"
        for name, form in parameters["properties"].items()
    }


def shown(value: object) -> str:
    """A short form of a value for a message."""
    try:
        return reprlib.repr(value)
    except Exception:  # Such as an integer of more than 4,300 digits.
        return f"a value of type `{type(value).__name__}`"


def _readings(value: Any) -> Iterator[Any]:
    """A value, and what else it can mean."""
    yield value
    if isinstance(value, str):
        value = json.loads({"True": "true", "False": "false"}.get(value.strip(), value))
        yield value
    elif _is_number(value):
        yield json.dumps(value)
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:
        yield int(value)


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, form) for form in schema["anyOf"])
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None and schema.get("nullable"):
        return True
    return (not kinds or any(kind in _TYPES and _TYPES[kind](value) for kind in kinds)) and value in schema.get(
        "enum", [value]
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in words."""
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    kinds = [_kind(form) for form in schema.get("anyOf", [])] or schema.get("type", "any value")
    return " or ".join(([kinds] if isinstance(kinds, str) else kinds) + ["null"] * schema.get("nullable", False))
