"""The values that an option of a type takes, in words, and the classes among them."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union

import torch
import yaml

from grail_lightning.app.cli.classes import BASES, choices

_NOUNS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    timedelta: ("a time such as 0:10:00", "times such as 0:10:00"),
    type(None): ("null", "null"),
    Any: ("any value", "any values"),
}


def parts_of(hint: Any) -> list[Any]:
    """The types of a union, and of one that stands inside another, each once; a type that is no union alone."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return list(dict.fromkeys(part for inner in typing.get_args(hint) for part in parts_of(inner)))
    return [hint]


def list_parts(hint: Any) -> list[Any]:
    """The types of an entry, for the parts of a type that are lists."""
    lists = [part for part in parts_of(hint) if _is_list(part)]
    return [kind for part in lists for entry in typing.get_args(part) if entry is not ... for kind in parts_of(entry)]


def classes_in(hint: Any) -> list[type]:
    """The base classes of the objects that an option takes, also of those that are made later, by a call."""
    parts = [typing.get_args(part)[-1] if _is_call(part) else part for part in parts_of(hint)]
    return [kind for of_part in parts for kind in parts_of(of_part) if _is_base(kind)]


def records_in(hint: Any) -> list[type]:
    """The dataclasses whose fields an option takes as a mapping."""
    return [part for part in parts_of(hint) if inspect.isclass(part) and _is_record(part)]


def takes(hint: Any, kind: type) -> bool:
    """Whether an option takes values of a type that is built in, as text or a mapping."""
    parts = [typing.get_origin(part) or part for part in parts_of(hint)]
    return Any in parts or any(inspect.isclass(part) and issubclass(part, kind) for part in parts)


def in_words(hint: Any, option: str) -> str:
    """What an option of a type takes: ``a whole number or null``, ``one of 'k1', 'k2', 'k3'``."""
    parts = sorted(parts_of(hint), key=lambda part: (part is type(None), _is_list(part)))
    words = [value for part in parts if typing.get_origin(part) is Literal for value in typing.get_args(part)]
    phrases = [f"one of {', '.join(map(repr, dict.fromkeys(words)))}"] if words else []
    phrases += [phrase for part in parts if (phrase := _phrase(part, option))]
    phrases = list(dict.fromkeys(phrases))
    return (", or " if any("," in phrase for phrase in phrases) else " or ").join(phrases)


def shown(value: object) -> str:
    """A value as a message quotes it: texts in quotes, others as YAML."""
    if isinstance(value, str):
        return repr(str(value))
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    except yaml.YAMLError:
        text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _phrase(part: Any, option: str) -> str:
    """What one type takes; empty for choices, which are listed together."""
    if part in _NOUNS:
        return _NOUNS[part][0]
    if typing.get_origin(part) is Literal or part is torch.Tensor:  # No tensor can be written in YAML.
        return ""
    if _is_list(part):
        return f"a list in brackets{_of(list_parts(part), option)}"
    if takes(part, Mapping):
        return "a mapping in braces"
    if records := records_in(part):
        fields = ", ".join(field.name for field in dataclasses.fields(records[0]))
        return f"a mapping in braces with the options {fields}"
    if names := choices(option):
        return f"one of {', '.join(names)}, or the import path of a class"
    if _is_call(part) and not classes_in(part):
        return "the import path of a function"
    return "the import path of a class"


def _of(entries: Collection[Any], option: str) -> str:
    """What the entries of a list are, behind the word list."""
    plain = [_NOUNS[entry][1] for entry in entries if entry in _NOUNS]
    words = [value for entry in entries if typing.get_origin(entry) is Literal for value in typing.get_args(entry)]
    plain += [f"{', '.join(map(repr, words))}"] if words else []
    others = [entry for entry in entries if entry not in _NOUNS and typing.get_origin(entry) is not Literal]
    others = [entry for entry in others if entry is not torch.Tensor]
    if choices(option):
        return " of such classes"
    if not others:
        return f" of {' or '.join(dict.fromkeys(plain))}" if plain else ""
    inner = dict.fromkeys(_phrase(entry, option) for entry in entries if typing.get_origin(entry) is not Literal)
    return f", each of whose entries is {' or '.join(inner)}"


def _is_list(part: Any) -> bool:
    origin = typing.get_origin(part) or part
    if not inspect.isclass(origin) or origin.__module__ not in ("builtins", "collections.abc"):
        return False
    return issubclass(origin, Iterable) and not issubclass(origin, (str, bytes, Mapping))


def _is_call(part: Any) -> bool:
    return typing.get_origin(part) is Callable or part is Callable


def _is_record(kind: type) -> bool:
    """Whether a class is a dataclass that no other one can replace."""
    return (
        dataclasses.is_dataclass(kind) and not inspect.isabstract(kind) and kind not in (b for b, _ in BASES.values())
    )


def _is_base(kind: Any) -> bool:
    has_noun = kind in _NOUNS or not inspect.isclass(kind) or kind.__module__ in ("builtins", "collections.abc")
    if has_noun or kind is torch.Tensor or typing.get_origin(kind) is not None:
        return False
    return not _is_list(kind) and not _is_record(kind)
