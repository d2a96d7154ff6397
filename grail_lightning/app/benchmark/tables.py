"""The figures of a result beside those of reference rows, as tables of texts and as rows of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grail_lightning.app.benchmark.claims import CHANCE, in_words, number
from grail_lightning.app.benchmark.result import Result, errors_of, figure, reason, value_of, worlds_of
from grail_lightning.app.results.statistics import Estimate
from grail_lightning.app.results.table import plain

NOTHING = "-"
"""The cell of a figure that does not apply."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts; the first column has the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()  # Why there is nothing, in a figure or in the whole table.


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method, control or score of a picture."""

    label: str
    kind: str  # own | control | reference | oracle
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Forest:
    """A figure of several methods with intervals, beside the value that uniform credit or chance has."""

    title: str
    world: str
    rows: Sequence[Row]
    neutral: float
    limits: tuple[float, float] | None = None  # Of the axis; None for those of the rows.
    digits: int = 2


@dataclass(frozen=True, kw_only=True)
class Section:
    """A question: what it asks, its pictures and its tables."""

    title: str
    about: str
    forests: Sequence[Forest] = ()
    tables: Sequence[Table] = ()
    curves: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # By world, then by the name of the curve.


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of a table: the path of its interval in the JSON, its title, and the digits after the point."""

    path: tuple[str, ...]
    title: str
    digits: int = 2


def detection_figures(errors: Sequence[str]) -> list[Figure]:
    """The columns of the question whether errors are found."""
    return [
        *(Figure(path=("auroc_forks", error), title=f"at forks: {in_words(error)}") for error in errors),
        *(Figure(path=("auroc_rollout", error), title=f"in rollout: {in_words(error)}") for error in errors),
        *(Figure(path=("values", outcome), title=f"agreement, {outcome}") for outcome in ("wrong", "right")),
        Figure(path=("blame", "flawed"), title="blame on flawed"),
        Figure(path=("blame", "flawed_uniform"), title="the same, uniform"),
    ]


WEIGHTS = [Figure(path=("weights", kind), title=kind) for kind in ("flawed", "sound", "inherited", "filler", "answer")]
_OPTIMISERS = (("adam", "Adam"), ("sgd", "SGD"))
GAINS = [
    *(Figure(path=("gain", key), title=f"gain, {name}") for key, name in _OPTIMISERS),
    *(Figure(path=("share_of_limit", key), title=f"share of the limit, {name}") for key, name in _OPTIMISERS),
    *(
        Figure(path=("gain_beside_baseline", baseline, key), title=f"{title}, {name}")
        for baseline, title in (
            ("best_constant", "less the best baseline"),
            ("balanced", "with equal praise and blame"),
        )
        for key, name in _OPTIMISERS
    ),
    Figure(path=("direction",), title="direction", digits=3),
    Figure(path=("noise",), title="noise"),
]
STEP = Figure(path=("cost", "step"), title="time of a step")


def sections(result: Result, references: Sequence[Result]) -> list[Section]:
    """The four questions, of which each has its pictures and tables."""
    others = [row for row in references if row["label"] != result["label"]]
    return [_detection(result, others), _gains(result, others), _training(result), _costs(result, others)]


def interval(estimate: Estimate | None, digits: int = 2, sign: str = "") -> str:
    """``0.97 [0.93, 1.00]``; `NOTHING` where there is nothing."""
    if estimate is None:
        return NOTHING
    value = number(estimate.value, digits)
    value = f"+{value}" if sign and estimate.value > 0 and value.strip("0.") else value
    return f"{value} [{number(estimate.low, digits)}, {number(estimate.high, digits)}]"


def _detection(result: Result, others: Sequence[Result]) -> Section:
    forests, tables = [], []
    for world in worlds_of(result):
        errors = errors_of(result, world)
        for error in errors:
            title = f"AUROC at forks: {in_words(error)}"
            forests += _forest(result, others, world, ("auroc_forks", error), title, CHANCE, (0.0, 1.0))
        tables.append(_compared(result, others, world, detection_figures(errors), "Errors"))
        tables.append(_compared(result, others, world, WEIGHTS, "Mean weight in wrong rollouts"))
    about = (
        "AUROC of flawed against sound steps: 0.5 is chance, 1 is every error above every sound step. At a fork, two "
        "wrong rollouts of a prompt are the same up to a token, so position and context are fixed; within a rollout "
        "position alone reaches 1. Agreement is the rank correlation with the measured effect of steps (resampled "
        "continuations), blame the share of the negative credit of wrong rollouts that is on flawed steps. Tokens are "
        "ranked by the scores of a method if its weights never fall where they rise, else by its weights."
    )
    return Section(title="Does it find the error?", about=about, forests=forests, tables=_filled(tables))


def _gains(result: Result, others: Sequence[Result]) -> Section:
    forests = []
    for world in worlds_of(result):
        best = ("gain_beside_baseline", "best_constant", "adam")
        forests += _forest(result, others, world, ("gain", "adam"), "Gain of a step, Adam", 1.0)
        forests += _forest(result, others, world, best, "Gain less that of the best lower baseline, Adam", 0.0)
    about = (
        "The first-order gain of expected reward in one step, relative to uniform credit, which is 1. A lower baseline "
        "(r - c mean with c < 1) gains more than uniform credit without any idea of tokens, so what remains beside the "
        "best of them counts, and so does the gain less 1 with praise and blame of equal size (Balanced). The share of "
        "the limit is the gain over that of credit by resampled values. The direction is the cosine of the method's "
        "mean gradient with that of the expected reward, the noise the variance of the gradient of one batch over the "
        "squared norm of the mean gradient."
    )
    tables = [_compared(result, others, world, GAINS, "Gain of a step") for world in worlds_of(result)]
    return Section(title="What does a step gain?", about=about, forests=forests, tables=_filled(tables))


def _training(result: Result) -> Section:
    rows: list[list[str]] = []
    curves: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for world in worlds_of(result):
        training = value_of(result, world, "training")
        if not training:
            notes.append(f"{in_words(world)}: {reason(result, world, 'training') or 'not measured.'}")
            continue
        baseline = (training.get("beside_baseline") or {}).get("baseline", "")
        names = {"method": result["label"], "uniform": "uniform credit", "baseline": f"lower baseline {baseline}"}
        drawn = {key: curve for key, curve in (training.get("curves") or {}).items() if curve.get("steps")}
        curves |= {world: {plain(names[key]): curve for key, curve in drawn.items()}} if drawn else {}
        rows += _trained(result, world, ("training",), "uniform credit")
        rows += _trained(result, world, ("training", "beside_baseline"), baseline)
        if recorded := (training.get("recorded") or {}).get("sentence"):
            notes.append(f"{in_words(world)}: {recorded}")
    columns = ["", "points", "p", "p (Holm)", "detectable", "rate", "seeds", "steps"]
    about = (
        "Training runs that are paired by seed, in percentage points of accuracy, each with its own learning rate, "
        "which was chosen on other seeds. Detectable is the true difference that such runs would find four times in "
        "five: a p-value above 0.05 says nothing about smaller ones."
    )
    title = "Differences in training" if rows else "It was not trained"
    tables = _filled([Table(title=title, columns=columns, rows=rows, notes=notes)])
    return Section(title="Does it train better?", about=about, tables=tables, curves=curves)


def _trained(result: Result, world: str, path: tuple[str, ...], other: str) -> Iterator[list[str]]:
    """The differences from other runs, as a mean over training and at the end."""
    facts, training = value_of(result, world, *path), value_of(result, world, "training")
    if not facts:
        return
    for key, when, suffix in (("over_training", "mean over training", ""), ("end", "at the end", "_end")):
        tested = [p_value(facts.get(f"{name}{suffix}")) for name in ("p", "p_holm")]
        least = facts.get(f"detectable{suffix}")
        settings = [training.get("rate"), len(training.get("seeds") or []), training.get("steps")]
        points = interval(figure(result, world, *path, key), 1, "+")
        cells = [points, *tested, NOTHING if least is None else f"{least:.1f}", *map(_cell, settings)]
        yield [f"{in_words(world)}: {when}, less {other}", *cells]


def _costs(result: Result, others: Sequence[Result]) -> Section:
    columns = ["", STEP.title, "forward passes", "extra tokens", "memory, MiB", "rollouts", "seconds of this benchmark"]
    rows = []
    for world in worlds_of(result):
        cost = value_of(result, world, "cost") or {}
        extra = [_cell(cost.get(key)) for key in ("forward_passes", "extra_tokens", "memory_mib")]
        counts = [_cell(value_of(result, world, key)) for key in ("rollouts", "seconds")]
        rows.append([in_words(world), interval(figure(result, world, *STEP.path)), *extra, *counts])
    tables = [Table(title="Cost", columns=columns, rows=rows)]
    names = worlds_of(result)
    compared = [
        [plain(row["label"]), *(interval(figure(row, world, *STEP.path)) for world in names)]
        for row in (result, *others)
        if any(figure(row, world, *STEP.path) for world in names)
    ]
    tables.append(Table(title="Time of a step, of all methods", columns=["", *map(in_words, names)], rows=compared))
    about = (
        "The time of a training step relative to one with uniform credit, which is 1; forward passes of a batch and "
        "sampled tokens for each token of the rollouts that the method adds; the memory that it adds at the "
        "peak, which is below 0 where the method needs less than uniform credit."
    )
    return Section(title="What does it cost?", about=about, tables=tables)


def rows_of(
    result: Result, others: Sequence[Result], world: str, path: tuple[str, ...]
) -> Iterator[tuple[str, str, Estimate | None]]:
    """The figure of the method, of its controls and of the reference rows: label, kind and figure."""
    yield plain(result["label"]), "own", figure(result, world, *path)
    for name in value_of(result, world, "controls") or ():
        yield f"control: {plain(name)}", "control", figure(result, world, "controls", name, *path)
    for row in others:
        kind = "oracle" if row["oracle"] else "reference"
        label = plain(row["label"]) + (" (oracle)" if row["oracle"] and row["label"] != "Oracle" else "")
        yield label, kind, figure(row, world, *path)


def _forest(
    result: Result,
    others: Sequence[Result],
    world: str,
    path: tuple[str, ...],
    title: str,
    neutral: float,
    limits: tuple[float, float] | None = None,
) -> list[Forest]:
    """A picture, if the method itself has the figure."""
    if figure(result, world, *path) is None:
        return []
    rows = [
        Row(label=label, kind=kind, estimate=estimate)
        for label, kind, estimate in rows_of(result, others, world, path)
        if estimate is not None
    ]
    return [Forest(title=title, world=in_words(world), rows=rows, neutral=neutral, limits=limits)]


def _compared(result: Result, others: Sequence[Result], world: str, figures: Sequence[Figure], title: str) -> Table:
    """Figures as columns, the method, its controls and the references as rows; rows without a figure are left out."""
    columns = {
        f.title: [(label, f.digits, e) for label, _, e in rows_of(result, others, world, f.path)] for f in figures
    }
    kept = {name: column for name, column in columns.items() if any(e is not None for *_, e in column)}
    cells = [[interval(e, digits) for _, digits, e in column] for column in kept.values()]
    names = [label for label, *_ in next(iter(columns.values()))]
    rows = [[name, *row] for name, *row in zip(names, *cells, strict=True) if set(row) - {NOTHING}] if kept else []
    why = {
        reason(result, world, *f.path): None
        for f in figures
        if figure(result, world, *f.path) is None and reason(result, world, *f.path)
    }
    return Table(title=f"{title}: {in_words(world)}", columns=["", *kept], rows=rows, notes=[*filter(None, why)])


def _filled(tables: Sequence[Table]) -> list[Table]:
    return [table for table in tables if table.rows or table.notes]


def p_value(value: float | None) -> str:
    """A p-value with three digits; `NOTHING` where there is none."""
    return NOTHING if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _cell(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
