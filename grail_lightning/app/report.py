"""``python -m grail_lightning.report RUN…``: figures of runs with intervals, paired differences, and learning curves.

The page `compare.md` of the documentation says how to read it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grail_lightning.app.cli.help import refuse
from grail_lightning.app.results.differences import CURVE, compare, compare_curves, other_validation, read_curves
from grail_lightning.app.results.runs import LoggedRun, find_runs, method_of
from grail_lightning.app.results.table import as_text, markdown, markdown_table, plain
from grail_lightning.app.views.curves import Part, Point, report_page
from grail_lightning.core.runtime.files import write_whole

_DIFFERENCE = ("difference", "difference_low", "difference_high")
_COLUMNS = (
    *("part", "task", "dataset", "method", "figure", "step", "problems", "seeds", "value", "low", "high"),
    *("baseline", *_DIFFERENCE, "p", "p_holm", "detectable", "paired_seeds"),
)
_DESCRIPTION = """Figures of runs with intervals, paired differences with p-values, and learning curves. A run is the
folder of a run, of its `test`, or of its samples. Runs whose configs differ only in the seed are seeds of one method;
NAME=RUN names a method."""


@dataclass(frozen=True, kw_only=True)
class _Section:
    """The report on the methods of one task; its texts are without control characters."""

    title: str  # The task, if the runs belong to one of a sweep, and what was evaluated.
    figures: pd.DataFrame  # One row for each figure, and one for each step of a curve; see `_COLUMNS`.
    notes: list[str]


def main(arguments: list[str] | None = None) -> None:
    """Run ``python -m grail_lightning.report``. A user's mistake is one line, with exit code 2."""
    formats = {".md": _as_markdown, ".csv": _as_csv, ".html": _as_html}
    prog, usage = "python -m grail_lightning.report", "%(prog)s RUN [RUN ...] [OPTIONS]"
    parser = argparse.ArgumentParser(prog, usage, _DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder, or NAME=FOLDER")
    parser.add_argument(
        "--baseline", metavar="NAME", help="what to compare with: a method, or a run of it (default: the first run's)"
    )
    parser.add_argument("--pass_at", type=int, nargs="+", metavar="K", help="the k of pass@k (default: all samples)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file (.md, .csv, .html)")
    options = parser.parse_args(arguments)
    try:
        if options.output and options.output.suffix not in formats:
            raise ValueError(f"`--output` must end in {' or '.join(formats)}, but got {options.output}.")
        runs = find_runs(options.runs)
        if options.baseline is not None:
            options.baseline = method_of(runs, options.baseline)
        tasks = dict.fromkeys(run.task for run in runs)
        sections = [_section([run for run in runs if run.task == task], options) for task in tasks]
        if options.output is None:
            sys.stdout.write(_as_text(sections))
        else:
            write_whole(options.output, formats[options.output.suffix](sections))
            print(f"Wrote {options.output}.")
    except (ValueError, OSError) as error:
        refuse(str(error))


def _section(runs: Sequence[LoggedRun], options: argparse.Namespace) -> _Section:
    """The report on the runs of one task."""
    if len({run.samples is None for run in runs}) > 1:
        without = ", ".join(run.given for run in runs if run.samples is None)
        raise ValueError(f"All runs of a report must have samples, or none, but {without} have none. Test them, too.")
    baseline, task = options.baseline or runs[0].method, runs[0].task
    curves, left_out = read_curves(runs)
    notes = [f"Left out of the curves, since they ended before other runs: {'; '.join(left_out)}."] if left_out else []
    if other := other_validation(runs):
        curves = curves[:0]
        notes = [f"{CURVE} is left out, since the validations are not the same: {other}."]
    parts, title = [compare_curves(curves, baseline)], f"{len(runs)} runs, none of which has kept samples."
    if runs[0].samples:
        number = runs[0].facts["num_samples"]
        parts.insert(0, compare(runs, baseline, options.pass_at or ([number] if number > 1 else [])))
        problems = sum(about["problems"] for about in runs[0].facts["datasets"].values())
        sampling = (runs[0].facts.get("sampling") or {}).items()
        conditions = ", ".join(f"{name} {value}" for name, value in sampling if value not in ([], None))
        title = f"{problems} problems x {number} samples; {conditions or 'by default'}."
    figures = pd.concat(parts).reindex(columns=_COLUMNS)
    if not (figures["part"] != "curve").any():
        listed = ", ".join(run.given for run in runs)
        raise ValueError(
            f"Runs of a report must have samples, or a step of {CURVE} that all have, but got neither in {listed}. "
            f"Run `grail-lightning test`, which keeps samples. {' '.join(notes)}"
        )
    return _Section(
        title=plain(f"Trained on task {task}: {title}" if task else title, 1000),
        figures=figures.assign(task=task),
        notes=[plain(note, 1000) for note in notes + _notes(runs, figures)],
    )


def _notes(runs: Sequence[LoggedRun], figures: pd.DataFrame) -> list[str]:
    """What a reader of the figures has to know."""
    notes = [
        "The page `Evaluate and compare` of the documentation says how to read the table. The p-values are two-sided."
    ]
    if (figures["seeds"] == 1).any():
        notes.append("One seed says nothing about other seeds, which may differ by more.")
    digests = [str((run.facts.get("model") or {}).get("digest") or run.given) for run in runs]
    if twice := next((digest for digest in digests if digests.count(digest) > 1), None):
        alike = " and ".join(run.given for run, digest in zip(runs, digests, strict=True) if digest == twice)
        notes.append(f"{alike} evaluated the same weights. A forgotten --ckpt_path is the usual reason.")
    return notes


def _table(section: _Section) -> pd.DataFrame:
    """The figures of a section as texts, by figure, dataset and method; without the columns that are empty."""
    rows = section.figures[section.figures["part"] != "curve"]
    tested = rows[rows["difference"].notna()]
    figures, baselines = set(tested["figure"]), set(tested["baseline"])
    table, index = [], []
    for row in rows.to_dict("records"):
        base = row["figure"] in figures and row["method"] in baselines
        cells = {
            "problems": _number(row["problems"], ".0f"),
            "seeds": _number(row["seeds"], ".0f"),
            "figure [95 %]": _interval(row, ("value", "low", "high")),
            "difference [95 %]": "baseline" if base else _interval(row, _DIFFERENCE, "+"),
            "paired": _number(row["paired_seeds"], ".0f"),
            "p": _p_value(row["p"]),
            "p (Holm)": _p_value(row["p_holm"]),
            "detectable": ">1" if row["detectable"] > 1 else _number(row["detectable"]),  # No difference is that large.
        }
        table.append(cells)
        step = f"step {row['step']:.0f}" if row["part"] == "end" else row["dataset"]
        index.append(tuple(plain(name) for name in (row["figure"], step, row["method"])))
    texts = pd.DataFrame(table, index=pd.MultiIndex.from_tuples(index))
    return texts.loc[:, (texts != "").any()]


def _interval(row: Mapping[str, Any], names: Sequence[str], sign: str = "") -> str:
    """A figure with its interval, as ``0.412 [0.380, 0.445]``; without an interval the figure alone."""
    value, *limits = (_number(row[name], f"{sign}.{1 if row['figure'] == 'tokens' else 3}f") for name in names)
    return f"{value} [{', '.join(limits)}]" if all(limits) else value


def _number(value: float, form: str = ".3f") -> str:
    return "" if math.isnan(value) else f"{value + 0.0:{form}}"


def _p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else _number(value)


def _as_text(sections: Sequence[_Section]) -> str:
    """The report as aligned columns."""
    parts = ((s.title, as_text(_table(s)), "\n".join(s.notes)) for s in sections)
    return "\n\n".join(text for section in parts for text in section) + "\n"


def _as_markdown(sections: Sequence[_Section]) -> str:
    """The report as Markdown, in which names are neither Markdown nor HTML."""
    parts = []
    for section in sections:
        table = _table(section)
        rows = [(*names, *cells) for names, *cells in table.itertuples(name=None)]
        parts += [markdown(section.title), markdown_table(["", "", "", *table.columns], rows, names=3)]
        parts.append("\n".join(f"- {markdown(note)}" for note in section.notes))
    return "\n\n".join(parts) + "\n"


def _as_html(sections: Sequence[_Section]) -> str:
    """The report as one HTML page: learning curves, and tables by pandas. All names are escaped."""
    parts = []
    for section in sections:
        rows = section.figures[section.figures["part"] == "curve"]
        points = [Point(*row) for row in rows[["step", "value", "low", "high", "seeds"]].astype(float).to_numpy()]
        curves: dict[str, list[Point]] = {}
        for method, point in zip(rows["method"], points, strict=True):
            curves.setdefault(plain(method), []).append(point._replace(seeds=int(point.seeds)))
        # What pandas sets in an attribute is in the page's own style sheet.
        table = _table(section).to_html(escape=True, border=0).replace(' style="text-align: right;"', "")
        parts.append(Part(title=section.title, figure=CURVE, curves=curves, table=table, notes=section.notes))
    return report_page(parts)


def _as_csv(sections: Sequence[_Section]) -> str:
    """Every figure as one row of CSV, in full precision. What a spreadsheet would take for a formula is quoted."""

    def cell(value: object) -> object:
        text = plain(value, 10_000) if isinstance(value, str) else ""
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text or value

    frame = pd.concat([section.figures for section in sections]).map(cell)
    whole = dict.fromkeys(["step", "problems", "seeds", "paired_seeds"], "Int64")
    return str(frame.astype(whole).to_csv(index=False, lineterminator="\n"))
