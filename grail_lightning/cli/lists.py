"""Lists of options, such as datasets, rewards and callbacks: a list that is given replaces the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jsonargparse import _typehints as typehints


@contextmanager
def whole_lists() -> Iterator[None]:
    """A context in which a list replaces that of an earlier file or argument, as every other value does.

    jsonargparse 4.53 takes the options that an entry leaves out from the entry at the same place of the earlier list,
    if both lists have the same length and the same classes. The second of two datasets would be read with the columns
    of another one. What is added to a list (`--data.test+={…}`) and an option of its last entry
    (`--trainer.callbacks.every_n_batches=…`) are no lists, and keep what is there.
    """
    library: Any = typehints  # Without types.
    adapt = library.adapt_typehints

    def adapted(val: Any, typehint: Any, *args: Any, **options: Any) -> Any:
        if isinstance(val, list) and not options.get("append"):
            options.pop("prev_val", None)
        return adapt(val, typehint, *args, **options)

    library.adapt_typehints = adapted
    try:
        yield
    finally:
        library.adapt_typehints = adapt
