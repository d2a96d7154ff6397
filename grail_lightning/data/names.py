"""The names of datasets as parts of the names of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable


def metric_name(text: str) -> str:
    """A text in a form that a metric's name may contain between two slashes."""
    return re.sub(r"[^\w.+-]", "_", text)


def metric_names(datasets: Iterable[str]) -> dict[str, str]:
    """The name of each dataset in a form that a metric's name may contain, without a slash or an @.

    Raises:
        ValueError: If two datasets would be reported under one name.
    """
    names: dict[str, str] = {}
    for dataset in dict.fromkeys(datasets):
        name = metric_name(dataset)
        twin = next((other for other, taken in names.items() if taken == name), None)
        if twin is not None:
            raise ValueError(
                f"The datasets {twin!r} and {dataset!r} must differ in more than what a metric name cannot hold, "
                f"but got `{name}` for both. Set `name` of one of them."
            )
        names[dataset] = name
    return names
