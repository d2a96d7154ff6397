"""The report as values and as tables of texts, from which every format is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from grail_lightning.evaluation.comparison import Estimate
from grail_lightning.report import notes as notes_on
from grail_lightning.report.curves import CURVE, Curve, End, compare_ends, other_validation, read_curves
from grail_lightning.report.figures import Compared
from grail_lightning.report.methods import Method
from grail_lightning.report.results import Evaluated, Line, compared, described, read_evaluated
from grail_lightning.report.runs import mapping

MOST_STEPS = 6
INTERVAL = "[95 %]"


@dataclass(frozen=True, kw_only=True)
class Section:
    """The report on the methods of one task.

    Attributes:
        task: The sweep's name of the task; empty without one.
        baseline: The method with which the others are compared; None if there is only one.
        facts: What was evaluated, in short sentences.
        solved: The lines of accuracy and pass@k.
        responses: The lines of the responses themselves.
        curves: The learning curves.
        ends: Where they end.
        notes: What a reader has to know.
    """

    task: str
    baseline: str | None
    facts: list[str]
    solved: list[Line]
    responses: list[Line]
    curves: list[Curve]
    ends: list[End]
    notes: list[str]

    @property
    def heading(self) -> str:
        """What the policies were trained on, whatever they were tested on; empty without a task."""
        return f"Trained on task {self.task}" if self.task else ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts.

    Attributes:
        title: What it shows.
        head: The names of the columns.
        rows: The cells.
        words: The number of columns, from the left, that are words rather than numbers.
        lines: What the rows show, where each shows one figure.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    words: int
    lines: Sequence[Compared] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asks of a report.

    Attributes:
        baseline: The name of the method that the others are compared with; None for the first one.
        pass_at: The k of each pass@k; None for the number of samples.
        maj_at: The k of each maj@k.
        common: Whether only problems that all runs have are compared.
    """

    baseline: str | None = None
    pass_at: Sequence[int] | None = None
    maj_at: Sequence[int] = ()
    common: bool = False


def make_section(methods: Sequence[Method], options: Options) -> Section:
    """The report on the methods of one task.

    Args:
        methods: The methods.
        options: What the user asks.

    Raises:
        ValueError: If the runs cannot be compared, or an option does not fit them.
    """
    evaluated = read_evaluated(methods, common=options.common, votes=bool(options.maj_at))
    curves = read_curves(methods)
    notes = notes_on.of_runs(methods)
    if curves and (other := other_validation(methods)):
        if evaluated is None:
            raise ValueError(
                f"Learning curves can be compared only on the same problems with the same sampling, but {other}. "
                "Leave one out, or test both on the same data."
            )
        notes.append(f"{CURVE} is left out, since it is not comparable: {other}.")
        curves = []
    known = [m.name for m in evaluated.methods] if evaluated else [curve.method for curve in curves]
    known = known or [method.name for method in methods]
    wanted = methods[0].name if options.baseline is None else options.baseline
    base = wanted if wanted in known else known[0]
    several = len(methods) > 1
    if wanted != base:
        notes.append(f"The baseline is {base}: {wanted} has no {'samples' if evaluated else 'curve'} here.")
    solved = compared(evaluated, base, *_counts(options, evaluated.num_samples)) if evaluated else []
    ends = compare_ends(curves, base)
    notes += notes_on.of_curves(methods, curves, ends)
    return Section(
        task=methods[0].task,
        baseline=base if several else None,
        facts=_facts(methods, evaluated),
        solved=solved,
        responses=described(evaluated) if evaluated else [],
        curves=curves,
        ends=ends,
        notes=notes + notes_on.of_figures(methods, evaluated, solved, ends),
    )


def _counts(options: Options, num_samples: int) -> tuple[list[int], list[int]]:
    """The k of each pass@k and of each maj@k."""
    default = [num_samples] if num_samples > 1 else []
    given = {"pass_at": default if options.pass_at is None else options.pass_at, "maj_at": options.maj_at}
    for name, numbers in given.items():
        for k in numbers:
            if not 1 <= k <= num_samples:
                raise ValueError(
                    f"`--{name}` must lie between 1 and the {num_samples} samples of each problem, but got {k}."
                )
    return sorted(set(given["pass_at"])), sorted(set(given["maj_at"]))


def _facts(methods: Sequence[Method], evaluated: Evaluated | None) -> list[str]:
    if evaluated is None:
        return [f"{sum(len(method.runs) for method in methods)} runs, none of which has kept samples."]
    first = evaluated.methods[0].evaluated[0]
    options = mapping(first.facts.get("sampling"))
    said = ", ".join(f"{name} {value}" for name, value in options.items() if value not in ([], None))
    total = sum(len(keys[0].keys) for keys in next(iter(evaluated.responses.values())).values())
    counted = f"{total} problems x {evaluated.num_samples} samples"
    return [f"{counted}; {said}." if said else f"{counted}."]


def tables(section: Section) -> list[Table]:
    """The tables of a section."""
    found = []
    for figure in dict.fromkeys(line.figure for line in section.solved):
        lines = [line for line in section.solved if line.figure == figure]
        found.append(_solved_table(figure, lines, section.baseline))
    if section.responses:
        found.append(_responses_table(section.responses))
    if section.ends:
        found += [_ends_table(section.ends, section.baseline), _curves_table(section.curves)]
    return found


def _tested(line: Compared, baseline: str | None) -> list[str]:
    """The cells of a comparison, one for each name of `_comparison_head`."""
    if baseline is None:
        return []
    if line.method == baseline:
        return ["baseline", "", "", ""]
    if line.difference is None:
        return [""] * 4
    shown = interval(line.difference, signed=True)
    least = "" if math.isnan(line.detectable) else f"{line.detectable:.3f}"
    detectable = ">1" if line.detectable > 1 else least  # No difference is that large.
    return [shown, p_text(line.difference.p_value), p_text(line.corrected), detectable]


def _comparison_head(baseline: str | None) -> list[str]:
    return [] if baseline is None else [f"difference {INTERVAL}", "p", "p (Holm)", "detectable"]


def _solved_table(figure: str, lines: Sequence[Line], baseline: str | None) -> Table:
    rows = [
        [
            line.dataset,
            line.method,
            str(line.problems),
            str(line.seeds),
            interval(line.estimate),
            *_tested(line, baseline),
        ]
        for line in lines
    ]
    head = ["", "method", "problems", "seeds", f"{figure} {INTERVAL}", *_comparison_head(baseline)]
    title = figure if baseline is None else f"{figure}, and differences from {baseline}"
    return Table(title=title, head=head, rows=_sparse(rows), words=2, lines=lines)


def _responses_table(lines: Sequence[Line]) -> Table:
    """One row for each dataset and method, one column for each figure."""
    figures = list(dict.fromkeys(line.figure for line in lines))
    cells: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        digits = 1 if line.figure == "tokens" else 3
        cells.setdefault((line.dataset, line.method), []).append(interval(line.estimate, digits=digits))
    rows = [[dataset, method, *found] for (dataset, method), found in cells.items()]
    head = ["", "method", *(f"{figure} {INTERVAL}" for figure in figures)]
    return Table(
        title="responses: mean length, share cut, share without an answer", head=head, rows=_sparse(rows), words=2
    )


def _ends_table(ends: Sequence[End], baseline: str | None) -> Table:
    rows = [[end.method, str(end.seeds), interval(end.estimate), *_tested(end, baseline)] for end in ends]
    head = ["method", "seeds", f"{CURVE} {INTERVAL}", *_comparison_head(baseline)]
    title = f"{CURVE} in training at step {ends[0].step}, mean over seeds"
    title += f", and differences from {baseline}" if baseline is not None else ""
    return Table(title=title, head=head, rows=rows, words=1, lines=ends)


def _curves_table(curves: Sequence[Curve]) -> Table:
    common = sorted(set.intersection(*(set(curve.steps) for curve in curves)))
    number = min(MOST_STEPS, len(common))
    steps = [common[round(k * (len(common) - 1) / max(number - 1, 1))] for k in range(number)]
    rows = []
    for curve in curves:
        band = dict(zip(curve.steps, curve.band, strict=True))
        rows.append([curve.method, *(interval(band[step]) for step in steps)])
    head = ["method", *(f"step {step}" for step in steps)]
    return Table(title=f"{CURVE} in training, mean over seeds", head=head, rows=rows, words=1)


def _sparse(rows: list[list[str]]) -> list[list[str]]:
    """A dataset is named once, in its first row."""
    return [["", *row[1:]] if number and row[0] == rows[number - 1][0] else row for number, row in enumerate(rows)]


def interval(found: Estimate, *, signed: bool = False, digits: int = 3) -> str:
    """A figure with its interval, as ``0.412 [0.380, 0.445]``; without an interval the figure alone."""
    sign = "+" if signed else ""

    def number(value: float) -> str:
        return f"{value + 0.0:{sign}.{digits}f}"

    if math.isnan(found.low):
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def p_text(value: float) -> str:
    """A p-value with three digits; empty for NaN."""
    if math.isnan(value):
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"
