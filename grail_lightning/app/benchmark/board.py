"""The board: results of many methods as the tables of a page of the site, made from the JSON files of a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from grail_lightning.app.benchmark.claims import Claim, in_words, number, plural
from grail_lightning.app.benchmark.detection_claims import at_forks
from grail_lightning.app.benchmark.result import (
    Result,
    errors_of,
    figure,
    file_name,
    read_result,
    reason,
    value_of,
    worlds_of,
)
from grail_lightning.app.benchmark.tables import NOTHING
from grail_lightning.app.benchmark.verdict import beside_best, difference_in_training, gains
from grail_lightning.app.results.statistics import Estimate
from grail_lightning.app.results.table import markdown_table, plain
from grail_lightning.core.runtime.files import write_whole

BOARD = Path(__file__).parent / "board"
"""The folder of the package's own results."""
_DIGITS = 5  # Significant ones of a figure in a row.
_Cell = Callable[[Result], str]


def read_board(folder: str | Path = BOARD) -> list[Result]:
    """The results of a folder's JSON files, in the order of their labels.

    Raises:
        ValueError: A file is not a result, or two files have the same label.
    """
    files: dict[str, Path] = {}
    results = []
    for file in sorted(Path(folder).glob("*.json")):
        result = read_result(file)
        if (first := files.setdefault(result["label"], file)) != file:
            raise ValueError(f"`label` must differ from row to row, but got {result['label']!r} in {first} and {file}.")
        results.append(result)
    return sorted(results, key=lambda result: str(result["label"]).casefold())


def board_row(result: Result) -> Result:
    """The result as a row of the board: without rollouts and learning curves, with five digits of each figure."""
    row = _rounded({key: value for key, value in result.items() if key != "examples"})
    for figures in row["worlds"].values():
        if figures and figures.get("training"):
            figures["training"].pop("curves", None)
    return dict(row)


def write_row(result: Result, folder: str | Path = BOARD) -> Path:
    """Write a row into the folder of a board, and return its file, whose name is the label."""
    file = Path(folder) / f"{file_name(result['label'])}.json"
    write_whole(file, json.dumps(board_row(result), indent=1, allow_nan=False) + "\n")
    return file


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


# --- the page -----------------------------------------------------------------------------------------------------


def board_page(results: Sequence[Result]) -> str:
    """The tables of the page as Markdown: a summary, a table for each figure, and where methods do not apply."""
    if not results:
        return "No result is in the folder yet."
    names = list(dict.fromkeys(world for result in results for world in result["worlds"]))
    errors = {world: _errors(results, world) for world in names}
    by_error = [(world, error) for world in names for error in errors[world]]
    parts = ["## At a glance", _table(results, _summary(list(dict.fromkeys(error for _, error in by_error))))]
    parts.append("## Does it find the error?")
    for group, title in (("auroc_forks", "AUROC at forks"), ("auroc_rollout", "AUROC within a rollout")):
        columns = {f"{in_words(w)}: {in_words(e)}": _figure(w, group, e) for w, e in by_error}
        parts += _titled(title, results, columns)
    for section, figures in _SECTIONS.items():
        parts += [f"## {section}"] if section else []
        for title, path, digits in figures:
            columns = {in_words(world): _figure(world, *path, digits=digits) for world in names}
            parts += _titled(title, results, columns)
    return "\n\n".join([*parts, *_not_applicable(results, names)])


_SECTIONS: dict[str, Sequence[tuple[str, tuple[str, ...], int]]] = {
    "": (
        ("Agreement with measured effects of steps, wrong rollouts", ("values", "wrong"), 2),
        ("Share of the blame that is on flawed steps", ("blame", "flawed"), 2),
    ),
    "What does a step gain?": (
        ("Gain of a step, Adam", ("gain", "adam"), 2),
        ("Gain of a step, SGD", ("gain", "sgd"), 2),
        ("Gain less that of the best lower baseline, Adam", ("gain_beside_baseline", "best_constant", "adam"), 2),
        ("Gain with equal praise and blame, less 1, Adam", ("gain_beside_baseline", "balanced", "adam"), 2),
    ),
    "Does it train better?": (
        ("Points over uniform credit, mean over training", ("training", "over_training"), 1),
        ("Points over the lower baseline, mean over training", ("training", "beside_baseline", "over_training"), 1),
    ),
    "What does it cost?": (("Time of a step", ("cost", "step"), 2),),
}


def _errors(results: Sequence[Result], world: str) -> list[str]:
    return list(dict.fromkeys(error for result in results for error in errors_of(result, world)))


def _summary(errors: Sequence[str]) -> dict[str, _Cell]:
    """In how many worlds the verdict's claims hold."""

    def finds(error: str) -> _Cell:
        return lambda result: _share(at_forks(result).get(error, ()))

    def trained(*path: str) -> _Cell:
        def cell(result: Result) -> str:
            signs = [difference_in_training(result, world, path) for world in worlds_of(result)]
            return _counted([sign for sign in signs if sign is not None])

        return cell

    return {
        "reads": lambda result: ", ".join(plain(name) for name in result["reads"]) or NOTHING,
        **{f"finds {plural(error)}": finds(error) for error in errors},
        "a step gains more": lambda result: _share(gains(result)),
        "more than a lower baseline": lambda result: _share(beside_best(result)),
        "trains better": trained("training"),
        "better than a lower baseline": trained("training", "beside_baseline"),
    }


def _share(found: Iterable[Claim]) -> str:
    return _counted([claim.sign for claim in found])


def _counted(signs: Sequence[int]) -> str:
    """``2 of 3``, and how many are on the other side."""
    if not signs:
        return NOTHING
    below = f", {signs.count(-1)} below" if -1 in signs else ""
    return f"{signs.count(1)} of {len(signs)}{below}"


def _figure(world: str, *path: str, digits: int = 2) -> _Cell:
    return lambda result: _half(figure(result, world, *path), digits)


def _half(estimate: Estimate | None, digits: int) -> str:
    """``0.97 ±0.02``: half of the width of the interval stands behind the figure."""
    if estimate is None:
        return NOTHING
    return f"{number(estimate.value, digits)} ±{number((estimate.high - estimate.low) / 2, digits)}"


def _titled(title: str, results: Sequence[Result], columns: dict[str, _Cell]) -> list[str]:
    table = _table(results, columns)
    return [f"### {title}", table] if table else []


def _table(results: Sequence[Result], columns: dict[str, _Cell]) -> str:
    """A table that the page's script can sort, of the methods and columns that have something."""
    cells = {title: [cell(result) for result in results] for title, cell in columns.items()}
    kept = {title: column for title, column in cells.items() if set(column) - {NOTHING}}
    rows = [
        [_label(result), *row] for result, *row in zip(results, *kept.values(), strict=True) if set(row) - {NOTHING}
    ]
    table = markdown_table(["method", *kept], rows, escape=escaped) if kept else ""
    return f'<div class="sortable" markdown="1">\n\n{table}\n\n</div>' if table else ""


def _label(result: Result) -> str:
    return plain(result["label"]) + (" (oracle)" if result["oracle"] and result["label"] != "Oracle" else "")


def _not_applicable(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    rows = [
        [_label(result), in_words(world), plain(reason(result, world) or NOTHING, 300)]
        for result in results
        for world in names
        if world in result["worlds"] and result["worlds"][world] is None
    ]
    rows += [
        [_label(result), in_words(world), plain(why, 300)]
        for result in results
        for world in worlds_of(result)
        if value_of(result, world, "gain") is None and (why := reason(result, world, "gain"))
    ]
    if not rows:
        return []
    table = markdown_table(["method", "world", "why"], rows, names=3, escape=escaped)
    return ["## Where there is no figure", f'<div class="sortable" markdown="1">\n\n{table}\n\n</div>']


def escaped(text: object) -> str:
    """The text for a page of the site, where a backslash stands before fewer characters than in GitHub's Markdown."""
    return re.sub(r"[\\`*_{}\[\]<>|#~&]", lambda found: f"&#{ord(found[0])};", str(text))
