"""Functions of the user's, found by their import paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def import_function(path: str, built_in: Mapping[str, F], option: str, example: str) -> F:
    """A built-in function by its name, or a function by its import path.

    Args:
        path: The name or the import path.
        built_in: The functions that have a name.
        option: What the user configures, for messages.
        example: An import path, for messages.

    Raises:
        ValueError: If there is no such function.
    """
    if path in built_in:
        return built_in[path]
    module, _, name = path.rpartition(".")
    expected = f"{option} must be one of {sorted(built_in)} or an import path such as `{example}`"
    if not module:
        raise ValueError(f"{expected}, but got {path!r}.")
    try:
        function: F = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{expected}, but got {path!r} ({error}). Is its folder on PYTHONPATH?") from error
    if not callable(function):
        raise ValueError(f"{expected}, but {path!r} is {function!r}, which cannot be called.")
    return function
