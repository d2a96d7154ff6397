"""The command ``python -m grail_lightning.report``: its options, and the report that it prints or writes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from grail_lightning.report.methods import Method, find_methods
from grail_lightning.report.page import page
from grail_lightning.report.runs import find_runs
from grail_lightning.report.sections import Options, Section, make_section
from grail_lightning.report.text import comma_separated, markdown, terminal
from grail_lightning.runtime.arguments import Parser, refused
from grail_lightning.runtime.writable import write_whole

FORMATS: dict[str, Callable[[Sequence[Section]], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "csv": comma_separated,
    "html": page,
}
ENDINGS = {".md": "markdown", ".csv": "csv", ".html": "html"}
DESCRIPTION = """Figures of runs with intervals, paired differences with p-values, and learning curves.

A run is the folder of a run, of its `test` or `validate`, or of its samples; no model is loaded. Runs whose configs
differ only in the seed are seeds of one method; NAME=RUN names a method, and gives several runs the same one."""


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        "python -m grail_lightning.report",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder, or NAME=FOLDER")
    parser.add_argument(
        "--baseline", metavar="NAME", help="the method to compare with (default: that of the first run)"
    )
    parser.add_argument("--pass_at", type=int, nargs="+", metavar="K", help="the k of pass@k (default: all samples)")
    parser.add_argument("--maj_at", type=int, nargs="+", metavar="K", default=[], help="the k of maj@k (default: none)")
    parser.add_argument("--common", action="store_true", help="compare only the problems that all runs have")
    parser.add_argument(
        "--format",
        choices=list(FORMATS),
        help="default: by the ending of --output (.md, .csv, .html), or terminal",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file instead of printing")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: The command line without the program's name; None for the process's own.

    Returns:
        0, or 2 for a user's mistake, which is one line on stderr.
    """
    try:
        options = make_parser().parse_args(arguments)
        chosen = _format(options.format, options.output)
        text = FORMATS[chosen](make_sections(options))
        if options.output is None:
            sys.stdout.write(f"{text}\n")
        else:
            write_whole(options.output, f"{text}\n")
            print(f"Wrote {options.output}.")
        sys.stdout.flush()
    except BrokenPipeError:
        # What reads the report, such as `head`, has seen enough. Nothing is left for the interpreter to flush.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        return refused("grail_lightning.report", error, choose="file")
    return 0


def make_sections(options: argparse.Namespace) -> list[Section]:
    """The report, one section for each task.

    Args:
        options: The options of the command line.

    Raises:
        ValueError: If the runs cannot be read or compared.
    """
    methods = find_methods(find_runs(options.runs))
    asked = Options(
        baseline=_baseline(options.baseline, methods),
        pass_at=options.pass_at,
        maj_at=options.maj_at,
        common=options.common,
    )
    tasks = dict.fromkeys(method.task for method in methods)
    parts = [[method for method in methods if method.task == task] for task in tasks]
    sections = [make_section(part, asked) for part in parts]
    if len(sections) > 1:
        apart = "Tasks are not compared with each other."
        sections = [replace(section, facts=[*section.facts, apart]) for section in sections]
    return sections


def _format(given: str | None, output: Path | None) -> str:
    """The format that is asked for, by its name or by the ending of a file."""
    if given is not None or output is None:
        return given or "terminal"
    if output.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"`--output` must end in {', '.join(ENDINGS)}, but got {output}. Take one of these, or say with "
            "--format what the file is."
        )
    return ENDINGS[output.suffix.lower()]


def _baseline(given: str | None, methods: Sequence[Method]) -> str | None:
    """The name of the baseline, which may be given as one of its runs."""
    if given is None:
        return None
    for method in methods:
        if given == method.name or given in [run.given for run in method.runs]:
            return method.name
    names = ", ".join(repr(name) for name in dict.fromkeys(method.name for method in methods))
    raise ValueError(f"`--baseline` must be one of {names}, but got {given!r}.")
