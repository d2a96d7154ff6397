"""The command ``python -m grail_lightning.sweep``: its options, and what it prints."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grail_lightning.cli.commands import refuse
from grail_lightning.cli.config_files import shipped
from grail_lightning.runtime.arguments import Parser
from grail_lightning.sweep.grid import Run, Study, read_study

if TYPE_CHECKING:
    from grail_lightning.sweep.plan import Planned
    from grail_lightning.sweep.runner import Outcome

DESCRIPTION = """Runs a grid of methods, tasks and seeds, each as a `grail-lightning fit` in a folder of its own.

Called again, it goes on: finished runs are skipped, interrupted ones resumed from their last checkpoint, and failed
ones tried again."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "python -m grail_lightning.sweep",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the YAML file of the sweep")
    parser.add_argument("--output", type=Path, help="the folder of the runs (default: `folder` of the file)")
    parser.add_argument("--jobs", type=int, help="runs at once (default: as many as GPUs, or cores and memory, allow)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="runs whose name or method matches, as 'GRAIL*'")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the runs with their commands, and run nothing")
    what.add_argument("--status", action="store_true", help="print how far each run is, and run nothing")
    what.add_argument("--slurm-script", action="store_true", help="print an sbatch script, one array task for each run")
    what.add_argument("--index", type=int, help="run the run with this number in --list alone, as an array task does")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run a sweep. A user's mistake is one line, with exit code 2; exit code 1 says that runs have failed."""
    try:
        own = make_parser().parse_args(arguments)
        study = read_study(_found(own.file), own.output)
        chosen = select(study, own.only, own.index)
        if own.jobs is not None and own.jobs < 1:
            raise ValueError(f"`--jobs` must be at least 1, but got {own.jobs}.")
    except ValueError as error:
        refuse(str(error))
    if own.status:
        print("\n".join(status(chosen)))
        return
    from grail_lightning.cli.app import mistakes_in_one_line
    from grail_lightning.runtime.writable import check_writable
    from grail_lightning.sweep.machine import slots
    from grail_lightning.sweep.plan import RunPlanner
    from grail_lightning.sweep.runner import Runner
    from grail_lightning.sweep.slurm import script

    with mistakes_in_one_line():
        check_decided(study, chosen, own.index)
        planner = RunPlanner(study)
        plans = planner.plan(chosen)
        if own.list:
            print("\n".join(listed(study, plans)))
            return
        if own.slurm_script:
            print(script(own.file, own.output, plans, _numbers(study, plans)))
            return
        check_writable(study.folder, "`folder`, or `--output`,")
        places = slots(plans, 1 if own.index is not None else own.jobs)
    number = len(places.environments)
    said = f"{len(plans)} runs in {study.folder}, {number} at once ({places.reason})"
    print(said if own.index is None else f"{plans[0].run.title} (--index {own.index}) in {study.folder}", flush=True)
    outcome = Runner(study, planner, places, lambda line: print(line, flush=True)).run(plans)
    print("\n".join(summary(outcome)), flush=True)
    raise SystemExit(exit_code(outcome))


def select(study: Study, patterns: Sequence[str] | None, index: int | None) -> list[Run]:
    """The runs that are asked for.

    A reported run whose point is to be chosen brings the runs that choose it.

    Raises:
        ValueError: If no run matches a pattern, or none has the number.
    """
    if index is not None:
        if patterns is not None:
            raise ValueError(
                "`--index` names one run of all in --list, so that `--only` must be left out, but got both."
            )
        if not 0 <= index < len(study.runs):
            raise ValueError(f"`--index` must lie between 0 and {len(study.runs) - 1}, but got {index}. See --list.")
        return [study.runs[index]]
    if patterns is None:
        return [*study.runs]
    found: list[Run] = []
    for pattern in patterns:
        matching = [run for run in study.runs if any(fnmatch.fnmatchcase(n, pattern) for n in (run.name, run.method))]
        if not matching:
            names = ", ".join(sorted({run.method for run in study.runs}))
            raise ValueError(f"`--only` must match the name of a run or a method ({names}), but got {pattern!r}.")
        found += matching
    groups = {run.group for run in found if run.point is None}
    return [run for run in study.runs if run in found or (run.choosing and run.group in groups)]


def check_decided(study: Study, chosen: Sequence[Run], index: int | None) -> None:
    """Check that a single run has its point, since the runs that choose it are tasks of their own.

    Raises:
        ValueError: If they are not finished.
    """
    from grail_lightning.sweep.records import read_record

    if index is None or chosen[0].point is not None:
        return
    for run in study.choosing(chosen[0].group):
        if read_record(run).state != "finished":
            raise ValueError(
                f"`--index` {index} must wait for the runs that choose the point of {chosen[0].title}, but {run.title} "
                "is not finished. Run those first, as the comments of --slurm-script show."
            )


def status(runs: Sequence[Run]) -> list[str]:
    """How far each run is, and the numbers of each state."""
    from grail_lightning.sweep.progress import duration
    from grail_lightning.sweep.records import is_claimed, read_record

    width = max(len(run.title) for run in runs)
    lines, states = [], Counter[str]()
    for run in runs:
        record = read_record(run)
        state = "running" if record.state != "finished" and is_claimed(run) else record.state
        states[state] += 1
        took = duration(record.seconds) if record.seconds else ""
        said = record.error if state == "failed" else record.outcome
        lines.append(f"{run.title:<{width}}  {state:<11}  {took:>10}  {said}".rstrip())
    return [*lines, ", ".join(f"{number} {state}" for state, number in states.items())]


def listed(study: Study, plans: Sequence[Planned]) -> list[str]:
    """The runs with their numbers and commands."""
    lines = []
    for number, plan in zip(_numbers(study, plans), plans, strict=True):
        lines.append(f"{number}  {plan.run.title}  ({plan.run.folder})")
        at = "  # at the point that will be chosen" if plan.run.point is None else ""
        lines.append(f"   grail-lightning fit {shlex.join(plan.arguments)}{at}")
    return lines


def _numbers(study: Study, plans: Sequence[Planned]) -> list[int]:
    """The number of each run among all runs of the sweep."""
    number = {run.folder: k for k, run in enumerate(study.runs)}
    return [number[plan.run.folder] for plan in plans]


def summary(outcome: Outcome) -> list[str]:
    """How the runs have ended."""
    numbers = ((outcome.finished, "finished"), (outcome.failed, "failed"), (outcome.left, "not finished"))
    lines = [", ".join(f"{len(runs)} {what}" for runs, what in numbers if runs or what == "finished")]
    lines += [f"failed: {run.title}: {record.error}" for run, record in outcome.failed]
    if outcome.failed or outcome.left:
        lines.append("The same command goes on.")
    return lines


def exit_code(outcome: Outcome) -> int:
    """0 if all runs are finished, 1 if not, 128 and its number after a signal."""
    if outcome.stopped is not None:
        return 128 + outcome.stopped
    return int(bool(outcome.failed or outcome.left))


def _found(file: Path) -> Path:
    """The file, or the one of that name among the configs of the package.

    Raises:
        ValueError: If there is none.
    """
    found = file if file.is_file() else shipped(file)
    if found is None:
        there = "is a folder" if file.is_dir() else "does not exist"
        raise ValueError(
            f"A sweep is read from a YAML file, but {file} {there} (looked in {Path.cwd()} and among the configs of "
            "the package). Correct the path."
        )
    return found
