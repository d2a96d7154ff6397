"""The commands ``python -m grail_lightning.report`` and ``python -m grail_lightning.evaluation regrade``."""

from __future__ import annotations

import argparse
import html
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grail_lightning.evaluate.compare import compare
from grail_lightning.evaluate.curves import CURVE, compare_curves, other_validation, picture, read_curves
from grail_lightning.evaluate.regrade import regrade
from grail_lightning.evaluate.runs import Run, find_runs, with_methods
from grail_lightning.evaluate.table import aligned
from grail_lightning.runtime.console import Parser, refused
from grail_lightning.runtime.files import write_whole

ENDINGS = {".md": "markdown", ".csv": "csv", ".html": "html"}
MOST_STEPS = 6
COLUMNS = (
    *("part", "task", "dataset", "method", "figure", "step", "problems", "seeds", "value", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p", "p_holm", "detectable", "paired_seeds"),
)
DESCRIPTION = """Figures of runs with intervals, paired differences with p-values, and learning curves.

A run is the folder of a run, of its `test` or `validate`, or of its samples; no model is loaded. Runs whose configs
differ only in the seed are seeds of one method; NAME=RUN names a method, and gives several runs the same one."""
STYLE = """:root { color-scheme: light dark } body { font: 15px sans-serif; margin: 2em auto; max-width: 75em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } img { background: white; max-width: 100% }
th, td { padding: .2em .8em; text-align: right } h1, h2, h3 { font-size: 1.1em } p { max-width: 50em }"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The report on the methods of one task."""

    task: str
    baseline: str
    facts: list[str]
    # One row for each figure, and one for each step of a curve; see `COLUMNS`.
    figures: pd.DataFrame
    notes: list[str]


def make_parser() -> Parser:
    """The options of a report."""
    settings: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser("python -m grail_lightning.report", description=DESCRIPTION, **settings)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder, or NAME=FOLDER")
    parser.add_argument("--baseline", metavar="NAME", help="the method to compare with (default: the first run's)")
    parser.add_argument("--pass_at", type=int, nargs="+", metavar="K", help="the k of pass@k (default: all samples)")
    parser.add_argument("--maj_at", type=int, nargs="+", metavar="K", default=[], help="the k of maj@k (default: none)")
    parser.add_argument("--common", action="store_true", help="compare only the problems that all runs have")
    formats = ["terminal", *ENDINGS.values()]
    parser.add_argument("--format", choices=formats, help="default: by the ending of --output, or terminal")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file (.md, .csv, .html)")
    return parser


def report(arguments: list[str] | None = None) -> int:
    """Run ``python -m grail_lightning.report``; returns 0, or 2 for a user's mistake, which is one line on stderr."""
    formats = {"terminal": as_text, "markdown": as_markdown, "csv": as_csv, "html": as_page}
    try:
        options = make_parser().parse_args(arguments)
        ending = options.output.suffix.lower() if options.output else ""
        if options.output and not options.format and ending not in ENDINGS:
            raise ValueError(
                f"`--output` must end in {', '.join(ENDINGS)}, but got {options.output}. Take one of these, or say "
                "with --format what the file is."
            )
        text = formats[options.format or ENDINGS.get(ending, "terminal")](make_sections(options)).rstrip("\n") + "\n"
        if options.output is None:
            sys.stdout.write(text)
        else:
            write_whole(options.output, text)
            print(f"Wrote {options.output}.")
        sys.stdout.flush()
    except BrokenPipeError:
        # What reads the report, such as `head`, has seen enough. Nothing is left for the interpreter to flush.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        return refused("grail_lightning.report", error, choose="file")
    return 0


def evaluation(arguments: list[str] | None = None) -> int:
    """Run ``python -m grail_lightning.evaluation``; returns as `report` does."""
    parser = Parser(prog="python -m grail_lightning.evaluation", description="Look at kept samples.")
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("regrade", help="grade kept samples again, without sampling")
    again.add_argument("folder", type=Path, help="the folder of a run that was tested, or a folder `samples`")
    again.add_argument("--output", type=Path, help="a new folder for the samples with their new verdicts")
    try:
        options = parser.parse_args(arguments)
        regrade(options.folder, options.output)
    except (ValueError, OSError) as error:
        return refused("grail_lightning.evaluation", error, choose="folder")
    return 0


def make_sections(options: argparse.Namespace) -> list[Section]:
    """The report, one section for each task of a sweep."""
    runs = with_methods(find_runs(options.runs))
    baseline = options.baseline
    for run in runs:
        baseline = run.method if baseline == run.given else baseline
    names = list(dict.fromkeys(run.method for run in runs))
    if baseline not in (None, *names):
        raise ValueError(f"`--baseline` must be one of {', '.join(map(repr, names))}, but got {baseline!r}.")
    tasks = dict.fromkeys(run.task for run in runs)
    return [_section([run for run in runs if run.task == task], baseline, options) for task in tasks]


def _section(runs: Sequence[Run], baseline: str | None, options: argparse.Namespace) -> Section:
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
    parts, facts = [], [f"{len(runs)} runs, none of which has kept samples."]
    if evaluated:
        pass_at, maj_at = _counts(options, evaluated[0].facts["num_samples"])
        parts.append(compare(evaluated, base, pass_at, maj_at, common=options.common))
        facts = [_conditions(evaluated[0], parts[0])]
    parts.append(compare_curves(curves, base))
    figures = pd.concat([part for part in parts if not part.empty]) if any(map(len, parts)) else pd.DataFrame()
    figures = figures.reindex(columns=COLUMNS).assign(task=runs[0].task)
    return Section(task=runs[0].task, baseline=base, facts=facts, figures=figures, notes=notes + _notes(runs, figures))


def _counts(options: argparse.Namespace, num_samples: int) -> tuple[list[int], list[int]]:
    """The k of each pass@k and of each maj@k."""
    pass_at = ([num_samples] if num_samples > 1 else []) if options.pass_at is None else options.pass_at
    for name, numbers in {"pass_at": pass_at, "maj_at": options.maj_at}.items():
        for k in numbers:
            if not 1 <= k <= num_samples:
                raise ValueError(
                    f"`--{name}` must lie between 1 and the {num_samples} samples of each problem, but got {k}."
                )
    return sorted(set(pass_at)), sorted(set(options.maj_at))


def _conditions(run: Run, figures: pd.DataFrame) -> str:
    """What was evaluated."""
    one = figures[(figures["part"] == "dataset") & (figures["figure"] == "tokens")].drop_duplicates("dataset")
    sampling = (run.facts.get("sampling") or {}).items()
    conditions = ", ".join(f"{name} {value}" for name, value in sampling if value not in ([], None))
    return f"{one['problems'].sum():.0f} problems x {run.facts['num_samples']} samples; {conditions or 'by default'}."


def _notes(runs: Sequence[Run], figures: pd.DataFrame) -> list[str]:
    """What a reader of the figures has to know."""
    methods = {run.method: run for run in runs}
    points = [f"{name}: {run.point}" for name, run in methods.items() if run.point and not name.endswith(run.point)]
    notes = [f"Values of the sweep's grid: {'; '.join(points)}."] if points else []
    ends = figures[figures["part"] == "end"]
    longer = figures[(figures["part"] == "curve") & (figures["step"] > ends["step"].max())]["method"].unique()
    if len(longer):
        notes.append(
            f"{CURVE} is compared at step {ends['step'].max()}, the last one that all methods have; there are later "
            f"ones of {'; '.join(longer)}."
        )
    notes.append("[low, high] is a 95 % interval.")
    tested = figures[figures["difference"].notna()]
    if len(tested):
        notes.append(
            "Differences are paired over problems, and over the seeds that both methods have. p is two-sided; p (Holm) "
            "is corrected for the number of comparisons: the datasets of a figure together, each average by itself. "
            "detectable: a true difference of this size would be found with a probability of 80 %."
        )
    most = figures["seeds"].max()
    for method, pairs in tested.groupby("method", sort=False)["paired_seeds"].first(numeric_only=False).items():
        if most > 1 and math.isnan(pairs):
            notes.append(f"Not paired over seeds, of which too few are the same as the baseline's: {method}.")
        elif pairs < most:
            notes.append(
                f"Differences over the {pairs:.0f} seeds that the method and the baseline both have: {method}."
            )
    single = figures[figures["seeds"] == 1]["method"].unique()
    if len(single):
        notes.append(f"One seed says nothing about other seeds, which may differ by more: {'; '.join(single)}.")
    if len(ends) > 1:
        notes.append(f"The intervals of {CURVE} are about other seeds; its problems are taken as they are.")
    return notes + _same_twice(runs)


def _same_twice(runs: Sequence[Run]) -> list[str]:
    """A note on runs that show the same weights."""
    digests = [str((run.facts.get("model") or {}).get("digest") or run.given) for run in runs]
    twice = next((digest for digest in digests if digests.count(digest) > 1), None)
    if twice is None:
        return []
    alike = " and ".join(run.given for run, digest in zip(runs, digests, strict=True) if digest == twice)
    return [
        f"{alike} evaluated the same weights. If they should not have, test again with --ckpt_path or with the "
        "--model.policy of each run."
    ]


def tables(section: Section) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables of a section: titles, and cells as texts."""
    figures, several = section.figures, section.figures["method"].nunique() > 1
    against = f", and differences from {section.baseline}" if several else ""
    solved = figures[figures["figure"].str.contains("@", na=False)]
    for figure, rows in solved.groupby("figure", sort=False):
        table = rows[["dataset", "method", "problems", "seeds"]].astype({"problems": int}).astype(str)
        yield f"{figure}{against}", _sparse(_with_tests(table, rows, section.baseline if several else ""))
    described = figures[figures["part"].isin(["dataset", "average"]) & ~figures["figure"].isin(solved["figure"])]
    if len(described):
        cells = described.assign(cell=[_interval(row) for row in described.to_dict("records")])
        columns = list(described["figure"].unique())
        table = cells.pivot(index=["dataset", "method"], columns="figure", values="cell")[columns]
        order = described[["dataset", "method"]].drop_duplicates()
        table = table.reindex(pd.MultiIndex.from_frame(order)).reset_index()
        yield "responses: mean length, share cut, share without an answer", _sparse(table)
    ends, curves = figures[figures["part"] == "end"], figures[figures["part"] == "curve"]
    if len(ends):
        table = ends[["method", "seeds"]].astype(str)
        title = f"{CURVE} in training at step {ends['step'].iloc[0]:.0f}, mean over seeds{against}"
        yield title, _with_tests(table, ends, section.baseline if several else "")
        steps = sorted(set.intersection(*(set(of["step"]) for _, of in curves.groupby("method"))))
        number = min(MOST_STEPS, len(steps))
        steps = [steps[round(k * (len(steps) - 1) / max(number - 1, 1))] for k in range(number)]
        cells = curves.assign(cell=[_interval(row) for row in curves.to_dict("records")])
        table = cells.pivot(index="method", columns="step", values="cell")[steps].reindex(ends["method"])
        yield f"{CURVE} in training, mean over seeds", table.rename(columns="step {:.0f}".format).reset_index()


def _with_tests(table: pd.DataFrame, rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """A table with the columns of the figure and of its comparison with the baseline, if there is one."""
    records = rows.to_dict("records")
    table = table.assign(**{f"{records[0]['figure']} [95 %]": [_interval(row) for row in records]})
    if not baseline:
        return table
    differences = [_interval(row, "difference", "+") for row in records]
    table["difference [95 %]"] = [
        "baseline" if row["method"] == baseline else cell for row, cell in zip(records, differences, strict=True)
    ]
    for name, column in {"p": "p", "p (Holm)": "p_holm", "detectable": "detectable"}.items():
        table[name] = [_number(row[column], column) for row in records]
    return table


def _number(value: float, column: str) -> str:
    if math.isnan(value):
        return ""
    if column == "detectable":
        return ">1" if value > 1 else f"{value:.3f}"  # No difference is that large.
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _interval(row: Mapping[str, Any], name: str = "value", sign: str = "") -> str:
    """A figure with its interval, as ``0.412 [0.380, 0.445]``; without an interval the figure alone."""
    low, high = ("low", "high") if name == "value" else (f"{name}_low", f"{name}_high")
    digits = 1 if row["figure"] == "tokens" else 3
    value, *limits = (f"{row[column] + 0.0:{sign}.{digits}f}" for column in (name, low, high))
    if math.isnan(row[name]):
        return ""
    return value if math.isnan(row[low]) else f"{value} [{', '.join(limits)}]"


def _sparse(table: pd.DataFrame) -> pd.DataFrame:
    """A dataset is named once, in its first row."""
    return table.assign(dataset=table["dataset"].where(table["dataset"] != table["dataset"].shift(), ""))


def plain(text: str, longest: int = 80) -> str:
    """A text without control characters, which are written out, and of at most so many characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _parts(section: Section) -> Iterator[tuple[str, str | pd.DataFrame]]:
    """The parts of a section, each with its kind; names are without control characters."""
    if section.task:
        yield "heading", plain(f"Trained on task {section.task}")
    yield from (("fact", plain(fact, 1000)) for fact in section.facts)
    for title, cells in tables(section):
        yield "title", plain(title, 160)
        yield "table", cells.map(lambda cell: plain(str(cell))).rename(columns={"dataset": ""})
    yield "text", ""
    yield from (("note", plain(note, 1000)) for note in section.notes)


def as_text(sections: Sequence[Section]) -> str:
    """The report as aligned columns."""
    lines = []
    for kind, part in (part for section in sections for part in _parts(section)):
        shown = part if isinstance(part, str) else aligned({name: list(part[name]) for name in part})
        lines.append(f"\n{shown}" if kind in ("heading", "title") else shown)
    return "\n".join(lines).lstrip("\n")


def as_markdown(sections: Sequence[Section]) -> str:
    """The report as Markdown, in which names are neither Markdown nor HTML."""
    forms = {"heading": "\n## {}\n", "title": "\n### {}\n", "note": "- {}"}
    lines = []
    for kind, part in (part for section in sections for part in _parts(section)):
        if isinstance(part, str):
            lines.append(forms.get(kind, "{}").format(_escaped(part)))
        else:
            cells = part.map(_escaped)
            rules = ["---" if name in ("", "method") else "--:" for name in cells]
            lines += [f"| {' | '.join(row)} |" for row in [list(cells), rules, *cells.to_numpy().tolist()]]
    return "\n".join(lines).lstrip("\n")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}<>|#~&])", r"\\\1", text)


def as_csv(sections: Sequence[Section]) -> str:
    """Every figure as one row of CSV, in full precision. What a spreadsheet would take for a formula is quoted."""

    def cell(value: object) -> object:
        text = plain(value) if isinstance(value, str) else ""
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text or value

    frame = pd.concat([section.figures for section in sections]).map(cell)
    whole = dict.fromkeys(["step", "problems", "seeds", "paired_seeds"], "Int64")
    return str(frame.astype(whole).to_csv(index=False, lineterminator="\n"))


def as_page(sections: Sequence[Section]) -> str:
    """The report as one HTML page, which runs no program and fetches nothing. All names are escaped."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><title>Comparison of runs</title><style>{STYLE}</style><h1>Runs</h1>'
    ]
    forms = {"heading": "<h1>{}</h1>", "title": "<h2>{}</h2>"}
    for section in sections:
        curves = section.figures[section.figures["part"] == "curve"]
        if len(curves):
            address = picture(curves, plain)
            parts.append(f'<img alt="{CURVE} against optimiser steps; a table has it, too" src="{address}">')
        for kind, part in _parts(section):
            if isinstance(part, str):
                parts.append(forms.get(kind, "<p>{}</p>").format(html.escape(part)))
            else:
                with pd.option_context("display.max_colwidth", None):
                    parts.append(part.to_html(index=False, escape=True, border=0))
    return "\n".join(parts)
