"""``python -m grail_lightning.report RUN…``: figures of runs with intervals, paired differences, and learning curves.

docs/report.md says how to read it.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import math
import re
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grail_lightning.evaluate.compare import compare
from grail_lightning.evaluate.curves import CURVE, compare_curves, other_validation, read_curves
from grail_lightning.evaluate.runs import Run, find_runs
from grail_lightning.evaluate.table import as_text
from grail_lightning.runtime.console import Parser, refused
from grail_lightning.runtime.files import write_whole

_ENDINGS = {".md": "markdown", ".csv": "csv", ".html": "html"}
_DIFFERENCE = ("difference", "difference_low", "difference_high")
_COLUMNS = (
    *("part", "task", "dataset", "method", "figure", "step", "problems", "seeds", "value", "low", "high"),
    *("baseline", *_DIFFERENCE, "p", "p_holm", "detectable", "paired_seeds"),
)
_DESCRIPTION = """Figures of runs with intervals, paired differences with p-values, and learning curves.

A run is the folder of a run, of its `test` or `validate`, or of its samples; no model is loaded. Runs whose configs
differ only in the seed are seeds of one method; NAME=RUN names a method, and gives several runs the same one."""
_STYLE = """:root { color-scheme: light dark } body { font: 15px sans-serif; margin: 2em auto; max-width: 75em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } img { background: white; max-width: 100% }
th, td { padding: .2em .8em; text-align: right; vertical-align: top } h1, h2 { font-size: 1.1em } p { max-width: 50em }
"""
_HOW_TO_READ = (
    "Differences are paired over problems, and over the seeds that both methods have (paired; none if too few are the "
    "same). p is two-sided; p (Holm) is corrected for the number of comparisons: the datasets of a figure together, "
    "each average by itself. detectable: a true difference of this size would be found with a probability of 80 %."
)


@dataclass(frozen=True, kw_only=True)
class _Section:
    """The report on the methods of one task; its texts are without control characters."""

    heading: list[str]  # One if the runs belong to a task of a sweep.
    conditions: str
    baseline: str
    figures: pd.DataFrame  # One row for each figure, and one for each step of a curve; see `_COLUMNS`.
    notes: list[str]


def make_parser() -> Parser:
    """The options of a report."""
    settings: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser("python -m grail_lightning.report", description=_DESCRIPTION, **settings)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder, or NAME=FOLDER")
    parser.add_argument("--baseline", metavar="NAME", help="the method to compare with (default: the first run's)")
    parser.add_argument("--pass_at", type=int, nargs="+", metavar="K", help="the k of pass@k (default: all samples)")
    parser.add_argument("--maj_at", type=int, nargs="+", metavar="K", default=[], help="the k of maj@k (default: none)")
    parser.add_argument("--common", action="store_true", help="compare only the problems that all runs have")
    formats = ["terminal", *_ENDINGS.values()]
    parser.add_argument("--format", choices=formats, help="default: by the ending of --output, or terminal")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file (.md, .csv, .html)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run ``python -m grail_lightning.report``; returns 0, or 2 for a user's mistake, which is one line on stderr."""
    formats = {"terminal": _as_text, "markdown": _as_markdown, "csv": _as_csv, "html": _as_page}
    try:
        options = make_parser().parse_args(arguments)
        ending = options.output.suffix.lower() if options.output else ""
        if options.output and not options.format and ending not in _ENDINGS:
            raise ValueError(
                f"`--output` must end in {', '.join(_ENDINGS)}, but got {options.output}. Take one of these, or say "
                "with --format what the file is."
            )
        text = formats[options.format or _ENDINGS.get(ending, "terminal")](_make_sections(options)).rstrip("\n") + "\n"
        if options.output is None:
            sys.stdout.write(text)
        else:
            write_whole(options.output, text)
            print(f"Wrote {options.output}.")
    except (ValueError, OSError) as error:
        return refused("grail_lightning.report", error, choose="file")
    return 0


def _make_sections(options: argparse.Namespace) -> list[_Section]:
    """The report, one section for each task of a sweep."""
    runs = find_runs(options.runs)
    baseline = next((run.method for run in runs if run.given == options.baseline), options.baseline)
    names = list(dict.fromkeys(run.method for run in runs))
    if baseline not in (None, *names):
        raise ValueError(f"`--baseline` must be one of {', '.join(map(repr, names))}, but got {baseline!r}.")
    tasks = dict.fromkeys(run.task for run in runs)
    return [_section([run for run in runs if run.task == task], baseline, options) for task in tasks]


def _section(runs: Sequence[Run], baseline: str | None, options: argparse.Namespace) -> _Section:
    """The report on the runs of one task."""
    evaluated, notes = [run for run in runs if run.samples], list[str]()
    curves, left_out = read_curves(runs)
    if not curves.empty and (other := other_validation(runs)):
        if not evaluated:
            raise ValueError(
                f"Learning curves can be compared only on the same problems with the same sampling, but {other}. "
                "Leave one out, or test both on the same data."
            )
        notes.append(f"{CURVE} is left out, since it is not comparable: {other}.")
        curves, left_out = curves[:0], []
    if left_out:
        notes.append(f"Left out of the curves, since they ended before other runs: {'; '.join(left_out)}.")
    known = list(dict.fromkeys([run.method for run in evaluated] or list(curves["method"]) or [runs[0].method]))
    wanted = baseline or runs[0].method
    base = wanted if wanted in known else known[0]
    if wanted != base:
        notes.append(f"The baseline is {base}: {wanted} has no {'samples' if evaluated else 'curve'} here.")
    parts, conditions = [compare_curves(curves, base)], f"{len(runs)} runs, none of which has kept samples."
    if evaluated:
        number = evaluated[0].facts["num_samples"]
        pass_at = options.pass_at or ([number] if number > 1 else [])
        parts.insert(0, compare(evaluated, base, pass_at, options.maj_at, common=options.common))
        conditions = _conditions(evaluated[0], parts[0])
    task, figures = runs[0].task, pd.concat(parts).reindex(columns=_COLUMNS)
    if not (figures["part"] != "curve").any():
        given = ", ".join(run.given for run in runs)
        raise ValueError(
            f"Runs of a report must have samples, or a step of {CURVE} that all have, but got neither in {given}. Run "
            "`grail-lightning test`, which keeps samples, or leave out runs that have not validated yet."
        )
    return _Section(
        heading=[_plain(f"Trained on task {task}")] if task else [],
        conditions=_plain(conditions, 1000),
        baseline=base,
        figures=figures.assign(task=task),
        notes=[_plain(note, 1000) for note in notes + _notes(runs, figures)],
    )


def _conditions(run: Run, figures: pd.DataFrame) -> str:
    """What was evaluated."""
    problems = figures[figures["part"] == "dataset"].drop_duplicates("dataset")["problems"].sum()
    sampling = (run.facts.get("sampling") or {}).items()
    conditions = ", ".join(f"{name} {value}" for name, value in sampling if value not in ([], None))
    return f"{problems:.0f} problems x {run.facts['num_samples']} samples; {conditions or 'by default'}."


def _notes(runs: Sequence[Run], figures: pd.DataFrame) -> list[str]:
    """What a reader of the figures has to know."""
    points = {run.method: run.point for run in runs if run.point and not run.method.endswith(run.point)}
    listed = "; ".join(f"{method}: {point}" for method, point in points.items())
    notes = [f"Values of the sweep's grid: {listed}."] if points else []
    if figures["difference"].notna().any():
        notes.append(_HOW_TO_READ)
    if (figures["seeds"] == 1).any():
        notes.append("One seed says nothing about other seeds, which may differ by more.")
    if (figures["part"] == "end").sum() > 1:
        notes.append(f"The intervals of {CURVE} are about other seeds; its problems are taken as they are.")
    digests = [str((run.facts.get("model") or {}).get("digest") or run.given) for run in runs]
    if twice := next((digest for digest in digests if digests.count(digest) > 1), None):
        alike = " and ".join(run.given for run, digest in zip(runs, digests, strict=True) if digest == twice)
        notes.append(
            f"{alike} evaluated the same weights. If they should not have, test again with --ckpt_path or with the "
            "--model.policy of each run."
        )
    return notes


def _table(section: _Section) -> pd.DataFrame:
    """The figures of a section as texts, by figure, dataset and method; without the columns that are empty."""
    rows = section.figures[section.figures["part"] != "curve"]
    tested = set(rows["figure"][rows["difference"].notna()])
    table, index = [], []
    for row in rows.to_dict("records"):
        base = row["figure"] in tested and row["method"] == section.baseline
        detectable = ">1" if row["detectable"] > 1 else _number(row["detectable"])  # No difference is that large.
        cells = {
            "problems": _number(row["problems"], ".0f"),
            "seeds": _number(row["seeds"], ".0f"),
            "figure [95 %]": _interval(row, ("value", "low", "high")),
            "difference [95 %]": "baseline" if base else _interval(row, _DIFFERENCE, "+"),
            "paired": _number(row["paired_seeds"], ".0f"),
            "p": _p_value(row["p"]),
            "p (Holm)": _p_value(row["p_holm"]),
            "detectable": detectable,
        }
        table.append(cells)
        step = f"step {row['step']:.0f}" if row["part"] == "end" else row["dataset"]
        index.append(tuple(_plain(name) for name in (row["figure"], step, row["method"])))
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


# --- formats ----------------------------------------------------------------------------------------------------------


def _plain(text: object, longest: int = 80) -> str:
    """A text without control characters, which are written out, and of at most so many characters."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text)
    )
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _as_text(sections: Sequence[_Section]) -> str:
    """The report as aligned columns."""
    parts = ((*s.heading, s.conditions, as_text(_table(s)), "\n".join(s.notes)) for s in sections)
    return "\n\n".join(text for of in parts for text in of)


def _as_markdown(sections: Sequence[_Section]) -> str:
    """The report as Markdown, in which names are neither Markdown nor HTML."""

    def escape(text: object) -> str:
        return re.sub(r"([\\`*_{}<>|#~&])", r"\\\1", str(text))

    parts = []
    for section in sections:
        table = _table(section)
        rows = [["", "", "", *table.columns], [*["---"] * 3, *["--:"] * len(table.columns)]]
        rows += [[escape(cell) for cell in (*names, *cells)] for names, *cells in table.itertuples(name=None)]
        parts += [f"## {escape(text)}" for text in section.heading]
        parts += [escape(section.conditions), "\n".join(f"| {' | '.join(row)} |" for row in rows)]
        parts.append("\n".join(f"- {escape(note)}" for note in section.notes))
    return "\n\n".join(parts)


def _as_csv(sections: Sequence[_Section]) -> str:
    """Every figure as one row of CSV, in full precision. What a spreadsheet would take for a formula is quoted."""

    def cell(value: object) -> object:
        text = _plain(value) if isinstance(value, str) else ""
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text or value

    frame = pd.concat([section.figures for section in sections]).map(cell)
    whole = dict.fromkeys(["step", "problems", "seeds", "paired_seeds"], "Int64")
    return str(frame.astype(whole).to_csv(index=False, lineterminator="\n"))


def _as_page(sections: Sequence[_Section]) -> str:
    """The report as one HTML page, which runs no program and fetches nothing. All names are escaped."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    lines = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><title>Comparison of runs</title><style>{_STYLE}</style><h1>Runs</h1>'
    ]
    for section in sections:
        lines += [f"<h1>{html.escape(text)}</h1>" for text in section.heading]
        curves = section.figures[section.figures["part"] == "curve"]
        if len(curves):
            lines.append(f'<img alt="{CURVE} against optimiser steps" src="{_picture(curves)}">')
        with pd.option_context("display.max_colwidth", None):
            table = str(_table(section).to_html(escape=True, border=0))
        lines += [f"<p>{html.escape(section.conditions)}</p>", table]
        lines += [f"<p>{html.escape(note)}</p>" for note in section.notes]
    return "\n".join(lines)


def _picture(curves: pd.DataFrame) -> str:
    """The curves of each method with their bands, as the address of an SVG image."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # The browser has letters that matplotlib's font lacks.
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes, lines, names = figure.add_subplot(xlabel="optimiser steps", ylabel=CURVE), [], []
        styles = ("solid", "dashed", "dotted", "dashdot")  # Neighbours differ without colour, too.
        for number, (method, of) in enumerate(curves.groupby("method", sort=False)):
            style = styles[number % len(styles)]
            (line,) = axes.plot(of["step"], of["value"], linestyle=style, marker="o", markersize=2.5)
            axes.fill_between(of["step"], of["low"], of["high"], color=line.get_color(), alpha=0.15, linewidth=0)
            lines.append(line)
            names.append(_plain(method))
        # Names are untrusted: a `$` begins no formula, and a `_` hides none.
        for text, name in zip(axes.legend(lines, ["x"] * len(lines)).get_texts(), names, strict=True):
            text.set_parse_math(False)
            text.set_text(name)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # What reads the report, such as `head`, may have seen enough.
    sys.exit(main())
