"""The result of a method as JSON: how a file is read, what must be in it, and how a figure is found.

A result is a mapping with the method, its options, what is needed to repeat it, and ``worlds``: the figures of each
world, or null where the method does not apply. An interval is ``[estimate, low, high]`` (95 %). A figure that does not
apply is null, and ``reasons`` says why, by its dotted path below the world.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from grail_lightning.app.results.statistics import Estimate

FORMAT = 1
Result = dict[str, Any]

_KEYS: dict[str, type | tuple[type, ...]] = {
    **{"method": str, "label": str, "options": dict, "package": str, "versions": dict, "machine": str, "date": str},
    **{"command": str, "seed": int, "batches": int, "reads": list, "oracle": bool, "worlds": dict},
}
_WORLD = ("rollouts", "auroc_rollout", "auroc_forks", "gain", "cost")  # Null where they do not apply.
_INTERVALS = (
    *("auroc_rollout", "auroc_forks", "blame", "values", "weights", "gain", "share_of_limit", "gain_beside_baseline"),
    *("direction", "noise", "controls"),
)
_TRAINING = ("over_training", "end")
_EXAMPLE = ("world", "prompt", "outcome", "tokens", "weights", "steps")
_AGAIN = "Run `python -m grail_lightning.benchmark` of this version again."


def read_result(file: str | Path) -> Result:
    """The result of a method from a JSON file.

    Raises:
        ValueError: The file is not JSON, is of another format, lacks a key, or has a figure that is not an interval.
        OSError: There is no such file.
    """

    def no_number(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a number of JSON")

    try:
        result = json.loads(Path(file).read_text(encoding="utf-8"), parse_constant=no_number)
    except ValueError as error:  # Also of text that is not UTF-8.
        raise ValueError(f"{file} must be the JSON of a result, but got {error}. {_AGAIN}") from None
    check_result(result, str(file))
    return dict(result)


def check_result(result: object, name: str) -> None:
    """Refuse what is not a result; `name` is the file's.

    Raises:
        ValueError: What is wrong, in one line.
    """
    if not isinstance(result, dict):
        raise ValueError(f"{name} must be a mapping with `format`, but got {type(result).__name__}. {_AGAIN}")
    if result.get("format") != FORMAT:
        raise ValueError(f"`format` of {name} must be {FORMAT}, but got {result.get('format')!r}. {_AGAIN}")
    if missing := [key for key in _KEYS if key not in result]:
        raise ValueError(f"{name} must have {_quoted(_KEYS)}, but got no {_quoted(missing)}. {_AGAIN}")
    for key, kind in _KEYS.items():
        # JSON's true is an int of Python.
        if not isinstance(result[key], kind) or (kind is int and isinstance(result[key], bool)):
            wanted = "bool" if kind is bool else getattr(kind, "__name__", str(kind))
            raise ValueError(f"`{key}` of {name} must be of type {wanted}, but got {result[key]!r:.60}. {_AGAIN}")
    for world, figures in result["worlds"].items():
        _check_world(figures, f"`worlds.{world}` of {name}")
    for number, example in enumerate(result.get("examples") or []):
        _check_example(example, f"`examples[{number}]` of {name}")


def _check_world(figures: object, name: str) -> None:
    if figures is None:
        return
    if not isinstance(figures, dict) or (missing := [key for key in _WORLD if key not in figures]):
        found = f"no {_quoted(missing)}" if isinstance(figures, dict) else f"{figures!r:.60}"
        raise ValueError(f"{name} must be null or have {_quoted(_WORLD)}, but got {found}. {_AGAIN}")
    training = figures.get("training") or {}
    parts: dict[str, object] = {key: figures.get(key) for key in _INTERVALS}
    parts["cost.step"] = (figures["cost"] or {}).get("step")
    parts |= {f"training.{key}": training.get(key) for key in _TRAINING}
    beside = training.get("beside_baseline") or {}
    parts |= {f"training.beside_baseline.{key}": beside.get(key) for key in _TRAINING}
    for path, value in _leaves(parts):
        if value is not None and not _is_interval(value):
            got = f"{value!r:.60}. {_AGAIN}"
            raise ValueError(f"`{path}` of {name} must be [estimate, low, high] or null, but got {got}")


def _check_example(example: object, name: str) -> None:
    if not isinstance(example, dict) or (missing := [key for key in _EXAMPLE if key not in example]):
        found = f"no {_quoted(missing)}" if isinstance(example, dict) else f"{example!r:.60}"
        raise ValueError(f"{name} must have {_quoted(_EXAMPLE)}, but got {found}. {_AGAIN}")
    number = len(example["tokens"])
    if len(example["weights"]) != number:
        raise ValueError(f"{name} must have a weight for each of {number} tokens, but got {len(example['weights'])}.")
    for step in example["steps"]:
        if not 0 <= step["start"] <= step["stop"] <= number:
            raise ValueError(f"{name} must have steps within {number} tokens, but got {step!r:.80}. {_AGAIN}")


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _is_interval(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value)) and value[1] <= value[2]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _quoted(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]


def file_name(label: str) -> str:
    """The name of the files of a method, without their endings."""
    return re.sub(r"[^\w.=-]+", "_", label).strip("._")[:80] or "report"


def worlds_of(result: Result) -> list[str]:
    """The worlds in which the method applies."""
    return [world for world, figures in result["worlds"].items() if figures is not None]


def errors_of(result: Result, world: str) -> list[str]:
    """The kinds of errors whose detection is measured in a world, such as ``slip``."""
    figures = result["worlds"].get(world) or {}
    return list(dict.fromkeys([*(figures.get("auroc_forks") or {}), *(figures.get("auroc_rollout") or {})]))


def figure(result: Result, world: str, *path: str) -> Estimate | None:
    """The figure of a path below a world, such as ``"gain", "adam"``; None where it does not apply."""
    value = value_of(result, world, *path)
    return Estimate(value=value[0], low=value[1], high=value[2]) if isinstance(value, list) and value else None


def value_of(result: Result, world: str, *path: str) -> Any:
    """What the JSON has at a path below a world; None if there is nothing."""
    value: Any = result["worlds"].get(world)
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def reason(result: Result, world: str, *path: str) -> str | None:
    """Why a figure, or the whole world without a path, does not apply; None if nothing is said."""
    if not path:
        return (result.get("reasons") or {}).get(world)
    reasons = value_of(result, world, "reasons") or {}
    for length in range(len(path), 0, -1):
        if said := reasons.get(".".join(path[:length])):
            return str(said)
    return None
