"""Functions of the user's, found by their import paths."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

GIVEN = "given in Python"  # Ends what a record of a run says of an object that no config can name.
F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A sentence, after a space, that asks for the name that is nearest to a wrong one; empty if none is near.

    `cutoff` is the least similarity of a near one, as of `difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near and near[0] != name else ""


def refuse_given(option: str, value: str) -> None:
    """Raise a ValueError if the value of an option is such a text."""
    if value.endswith(GIVEN):
        raise ValueError(
            f"`{option}` must be a file or a name, but got {value!r}: an object of a Python program, which a config "
            "cannot repeat. Run that program again; or save the object, and give the file."
        )


def import_function(path: str | F, built_in: Mapping[str, F], option: str, example: str) -> F:
    """A built-in function by its name, a function by its import path, or the given one.

    `option` is what the user configures and `example` an import path, both for messages.
    """
    if not isinstance(path, str):
        return path
    if path in built_in:
        return built_in[path]
    module, _, name = path.rpartition(".")
    expected = f"{option} must be one of {sorted(built_in)} or an import path such as `{example}`"
    if not module:
        raise ValueError(f"{expected}, but got {path!r}.{did_you_mean(path, built_in)}")
    try:
        namespace = importlib.import_module(module)
    except ImportError as error:
        # What is missing may also be a module that the user's imports: it is named, and is no matter of the path.
        lost = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        hint = " Is its folder on PYTHONPATH?" if lost else ""
        raise ValueError(f"{expected}, but got {path!r} ({error}).{hint}") from error
    if not hasattr(namespace, name):
        hint = did_you_mean(name, dir(namespace)) or " Correct the name, or define it there."
        raise ValueError(f"{expected}, but got {path!r} ({module} has no {name!r}).{hint}")
    function: F = getattr(namespace, name)
    if not callable(function):
        raise ValueError(f"{expected}, but {path!r} is {function!r}, which cannot be called.")
    return function
