"""The arguments of a call, checked against the JSON schema that the policy was told."""

from __future__ import annotations

import copy
import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

_Schema = Mapping[str, Any]


def checked_arguments(schema: _Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a call's arguments. A value that fits its schema stays as it is, as in TRL.

    One that does not is converted if nothing is lost: ``"3"`` and ``3.0`` to 3, ``3`` to ``"3"``, ``"true"`` to True,
    ``"[1]"`` to ``[1]``.

    Args:
        schema: A tool's, as `transformers.utils.get_json_schema` makes it.
        arguments: Values as JSON has them.

    Raises:
        ValueError: An argument is missing, unknown or of another type. The message is for the policy.
    """
    function = schema["function"]
    properties, required = function["parameters"]["properties"], function["parameters"].get("required", ())
    wrong = [f"{shown(name)} is not a parameter" for name in arguments if name not in properties][:3]
    wrong += [f"`{name}` is missing" for name in required if name not in arguments]
    made = {}
    for name in [name for name in arguments if name in properties]:
        try:
            made[name] = copy.deepcopy(_converted(arguments[name], properties[name]))
        except (ValueError, RecursionError):
            wrong.append(f"`{name}` must be {_kind(properties[name])}, but got {shown(arguments[name])}")
    if wrong:
        form = [f"{name}: {_kind(s)}{'' if name in required else ' (optional)'}" for name, s in properties.items()]
        raise ValueError(f"{'; '.join(wrong)}. The tool is `{function['name']}({', '.join(form)})`.")
    return made


def shown(value: object) -> str:
    """A short form of a value for a message."""
    try:
        return reprlib.repr(value)
    except Exception:  # Such as an integer of more than 4,300 digits.
        return f"a value of type `{type(value).__name__}`"


def _converted(value: Any, schema: _Schema) -> Any:
    """The first reading of a value that fits one of the forms of its schema; a ValueError without any."""
    kinds = schema.get("type")
    forms = schema.get("anyOf") or [
        {**schema, "type": kind} for kind in (kinds if isinstance(kinds, list) else [kinds])
    ]
    forms = [*forms, *[{"type": "null"}] * schema.get("nullable", False)]
    for reading in _readings(value):
        for form in forms:
            try:
                return _fitting(reading, form)
            except ValueError:
                continue
    raise ValueError(value)


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


def _fitting(value: Any, form: _Schema) -> Any:
    """The value as it is, with the members of a list or an object converted."""
    kind = form.get("type")
    if kind == "array" and isinstance(value, list):
        each = form.get("prefixItems", [form.get("items", {})] * len(value))
        return [_converted(one, schema) for one, schema in zip(value, each, strict=True)]
    if kind == "object" and isinstance(value, dict):
        return {name: _converted(one, form.get("additionalProperties", {})) for name, one in value.items()}
    fits = {
        None: True,
        "integer": type(value) is int,
        "number": _is_number(value),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    if not fits.get(kind, False) or value not in form.get("enum", [value]):
        raise ValueError(value)
    return value


def _kind(schema: _Schema) -> str:
    """A schema in words."""
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    kinds = [_kind(form) for form in schema.get("anyOf", [])] or schema.get("type", "any value")
    return " or ".join(([kinds] if isinstance(kinds, str) else kinds) + ["null"] * schema.get("nullable", False))


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
