"""Names that a module exports and imports when they are asked for (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(module: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that exports names from elsewhere: `exports` has the module of each name."""

    def attribute(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(exports[name]), name)

    return attribute
