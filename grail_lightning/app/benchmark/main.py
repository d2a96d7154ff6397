"""``python -m grail_lightning.benchmark METHOD``: how good a credit method is, beside the methods of the package.

Every method weighs the same stored rollouts. Each world is measured in a process of its own and kept in a file whose
name has a digest of the method, its options and all code that matters, so that a call that was stopped goes on, and the
same call again is instant. The report is a page, a Markdown text, and the figures as JSON.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse.typing import NonNegativeInt, PositiveInt
from tqdm import tqdm

from grail_lightning import __version__
from grail_lightning.app.benchmark import measure
from grail_lightning.app.benchmark.board import read_board
from grail_lightning.app.benchmark.digest import LIBRARIES, code_digest, digest_of
from grail_lightning.app.benchmark.processes import Job, run_jobs
from grail_lightning.app.benchmark.references import REFERENCES
from grail_lightning.app.benchmark.report import write_report
from grail_lightning.app.benchmark.result import FORMAT, Result, file_name
from grail_lightning.app.benchmark.stored import stored_batches
from grail_lightning.app.benchmark.subjects import Subject
from grail_lightning.app.benchmark.training import Request, Trained, check, train
from grail_lightning.app.benchmark.training_progress import Progress
from grail_lightning.app.benchmark.verdict import verdict
from grail_lightning.app.benchmark.worlds import DEFAULT_WORLDS, WORLDS
from grail_lightning.app.cli.mistakes import mistakes_in_one_line
from grail_lightning.app.cli.trainer_options import environments_on_cores
from grail_lightning.core.runtime.files import check_writable, held

BATCHES = 32
_SECONDS = {"sums": 100.0, "long_sums": 250.0, "words": 110.0, "code": 110.0, "search": 150.0, "charts": 150.0}
"""About those that a method of one forward pass takes, for the bar of progress alone."""
_SECONDS_OF_COST = 25.0

EXAMPLE = """examples:
  python -m grail_lightning.benchmark my_credit.Surprise
  python -m grail_lightning.benchmark my_credit.Surprise --credit.top=3.0 --worlds sums words search --against GRAIL
  python -m grail_lightning.benchmark TreeAdvantage --advantage=GroupMean --advantage.share=0.5 --control=Balanced
  python -m grail_lightning.benchmark my_credit.Surprise --train --seeds 6

The class is found from the folder in which the command is started. Further options are those of the method
(--credit.OPTION), of a control (--control, --control.OPTION) and of an estimator of the advantage (--advantage,
--advantage.OPTION), as `fit` takes them behind --model."""


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        "python -m grail_lightning.benchmark",
        description="Judge a credit method in worlds where the right credit is known, beside the package's methods.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("method", help="a method of the package, or the import path of a class of your own")
    made.add_argument(
        "--worlds",
        nargs="+",
        choices=[*WORLDS],
        default=[*DEFAULT_WORLDS],
        metavar="WORLD",
        help=f"of {', '.join(WORLDS)} (default: {' '.join(DEFAULT_WORLDS)})",
    )
    made.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="further methods to show beside it, with their default options (measured if no figures are shipped)",
    )
    made.add_argument(
        "--batches",
        type=PositiveInt,
        default=BATCHES,
        help=f"of 128 stored rollouts of each world (default: {BATCHES})",
    )
    made.add_argument(
        "--train", action="store_true", help="train with the method, too: some ten minutes and more a world"
    )
    made.add_argument(
        "--arms",
        choices=["recorded", "here"],
        default="recorded",
        help="whether the trainings with uniform credit and with the lower baseline are those that the package has, or "
        "are made here, too (default: recorded)",
    )
    made.add_argument("--seeds", type=PositiveInt, default=6, help="of training (default: 6)")
    made.add_argument("--seed", type=NonNegativeInt, default=0, help="of what methods draw at random (default: 0)")
    made.add_argument("--jobs", type=PositiveInt, default=None, help="processes at once (default: one for each core)")
    made.add_argument(
        "--output",
        type=Path,
        default=Path("benchmark"),
        help="the folder of reports and of what is kept (default: benchmark)",
    )
    return made


class Judged(NamedTuple):
    """A method of a call with its jobs: of each world its quality and its cost."""

    subject: Subject
    command: str  # That measures it alone.
    name: str  # As it was given.
    options: list[str]
    jobs: dict[str, tuple[Job, Job]]


def judged(name: str, options: list[str], call: argparse.Namespace) -> Judged:
    """A method with its jobs; a ValueError of one line about a mistake in what was given."""
    for world in call.worlds:
        if (number := stored_batches(WORLDS[world].file)) < call.batches:
            raise ValueError(f"`--batches` must be at most {number}, as many as {world} has, but got {call.batches}.")
    subject = measure.subject_named(name, options)
    parts = [subject.method, subject.control, subject.advantage]
    given = {"method": name, "options": options, "batches": call.batches, "seed": call.seed}
    jobs = {}
    for world in call.worlds:
        file = call.output / "kept" / f"{file_name(subject.name)}_{world}_{digest_of(parts, world=world, **given)}.json"
        what = {"method": name, "options": options, "world": world, "seed": call.seed}
        label = f"{subject.name} in {world}"
        jobs[world] = (
            Job(
                name=label,
                measure=measure.quality,
                arguments=what | {"batches": call.batches},
                units=_SECONDS[world] * call.batches / BATCHES,
                file=file,
            ),
            Job(
                name=f"{label}, cost",
                measure=measure.cost,
                arguments=what,
                units=_SECONDS_OF_COST,
                file=file.with_stem(f"{file.stem}_cost"),
            ),
        )
    words = ["python", "-m", "grail_lightning.benchmark", name, *options, "--worlds", *call.worlds]
    words += [f"--batches={call.batches}", f"--seed={call.seed}"]
    return Judged(subject, shlex.join(words), name, options, jobs)


def jobs_of(every: Iterable[Judged]) -> list[Job]:
    """The jobs of all methods."""
    return [job for one in every for pair in one.jobs.values() for job in pair]


def result_of(one: Judged, outcomes: Mapping[Path, dict[str, Any]], call: argparse.Namespace) -> Result:
    """The JSON of a result, without training, from the outcomes of its jobs by their files."""
    worlds, reasons, reads, examples = dict[str, Any](), {}, dict[str, None](), []
    for world, (quality, cost) in one.jobs.items():
        found, its_cost = outcomes[quality.file], outcomes[cost.file]
        worlds[world] = figures = found["figures"]
        reads |= dict.fromkeys(found["reads"])
        examples += found["examples"]
        if figures is None:
            reasons[world] = found["reason"]
            continue
        figures["cost"] = its_cost["figures"]
        figures["training"] = None
        figures["reasons"] |= its_cost["reasons"] | {"training": "Give --train to train with it."}
    subject = one.subject
    told = dict(subject.given)
    credit = told.get("credit", {"class_path": getattr(subject.method, "__name__", one.name)})
    return {
        "format": FORMAT,
        "method": credit["class_path"],
        "label": subject.name,
        "options": subject.options,
        "control": told.get("control"),
        "advantage": told.get("advantage", {"class_path": "GroupMean"}),
        "package": __version__,
        "code": code_digest(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "date": date.today().isoformat(),
        "command": one.command,
        "seed": call.seed,
        "batches": call.batches,
        "reads": [*reads],
        "oracle": any(outcomes[quality.file]["oracle"] for quality, _ in one.jobs.values()),
        "worlds": worlds,
        "reasons": reasons,
        "examples": examples,
        "verdict": [],
    }


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def add_training(one: Judged, result: Result, call: argparse.Namespace) -> None:
    """Train with the method, and put the figures into its result."""
    worlds = [world for world, figures in result["worlds"].items() if figures is not None]
    request = request_of(one, worlds, call)
    with tqdm(bar_format="{desc}", mininterval=1.0 if sys.stderr.isatty() else 60.0) as bar:

        def show(progress: Progress) -> None:
            bar.set_description_str(str(progress), refresh=False)
            bar.update(0)

        put_training(train(request, progress=show, say=tqdm.write), result)
    result["command"] += f" --train --seeds {call.seeds} --arms {call.arms}"


def put_training(trained: Trained, result: Result) -> None:
    """Put the figures of trainings, and the reasons of those that are missing, into a result."""
    for world, figures in trained.figures.items():
        result["worlds"][world]["training"] = figures
        result["worlds"][world]["reasons"].pop("training", None)
    for path, reason in trained.reasons.items():
        world, _, rest = path.partition(".")
        result["worlds"][world]["reasons"]["training" + (f".{rest}" if rest else "")] = reason


def request_of(one: Judged, worlds: Sequence[str], call: argparse.Namespace) -> Request:
    """What is to be trained of a method; a ValueError if it is a bare score."""
    parts = [one.subject.method, one.subject.control, one.subject.advantage]
    key = digest_of(parts, method=one.name, options=one.options)
    # A row of the board that is named without options has its own ones.
    row = None if one.options else REFERENCES.get(one.name)
    if row is not None and row.credit is None:
        raise ValueError(f"`--train` must be left out with {one.name}: a bare score of tokens cannot train a policy.")
    return Request(
        method=(row.credit or "") if row else one.name,
        options=tuple(row.arguments if row else one.options),
        worlds=tuple(worlds),
        seeds=call.seeds,
        folder=call.output / "runs" / f"{file_name(one.subject.name)}_{key}",
        jobs=call.jobs,
        arms=call.arms,
        arms_folder=call.output / "runs" / f"arms_{code_digest()}",
    )


def references(others: Sequence[Result], shipped: Sequence[Result], label: str, batches: int) -> list[Result]:
    """What a method is shown beside: other methods of the call, and shipped results of the same rollouts."""
    named = {result["label"] for result in others} | {label}
    same = (result for result in shipped if result["label"] not in named and result["batches"] == batches)
    return [*others, *same]


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge a credit method. A user's mistake is one line, with exit code 2; Ctrl-C is exit code 130."""
    call, further = parser().parse_known_args(arguments)
    options = joined(further)
    with mistakes_in_one_line(__file__):
        check_writable(call.output, "`--output`")
        shipped = read_board()
        every = [
            judged(call.method, options, call),
            *(judged(n, [], call) for n in call.against if not _has(shipped, n, call)),
        ]
        labels = [one.subject.name for one in every]
        if len({*labels}) < len(labels):
            raise ValueError(f"The methods of a call must have different names, but got {', '.join(labels)}.")
        if call.train:
            for one in every:
                check(request_of(one, call.worlds, call))
        with held(call.output, "benchmark", "`--output`"):
            try:
                _run(every, shipped, call)
            except KeyboardInterrupt:
                jobs = jobs_of(every)
                kept = sum(job.file.exists() for job in jobs)
                print(f"\nStopped. {kept} of {len(jobs)} parts are kept; the same command goes on.", file=sys.stderr)
                raise SystemExit(130) from None


def joined(words: Sequence[str]) -> list[str]:
    """Options with their values in one word each: ``--credit.top 3.0`` is ``--credit.top=3.0``."""
    options: list[str] = []
    for word in words:
        if options and not word.startswith("--") and "=" not in options[-1]:
            options[-1] += f"={word}"
        else:
            options.append(word)
    return options


def _has(shipped: Sequence[Result], name: str, call: argparse.Namespace) -> bool:
    """Whether the package ships what was asked for: a method with its default options in these worlds."""
    labels = (result for result in shipped if result["label"] == name and result["batches"] == call.batches)
    return any({*call.worlds} <= {*result["worlds"]} for result in labels)


def _run(every: Sequence[Judged], shipped: Sequence[Result], call: argparse.Namespace) -> None:
    jobs = sorted(jobs_of(every), key=lambda job: -job.units)  # The last ones to end are then short.
    how = {"unit": "s", "bar_format": "{percentage:3.0f}% |{bar:30}| about {remaining} left {postfix}"}
    with tqdm(total=sum(job.units for job in jobs), mininterval=1.0 if sys.stderr.isatty() else 30.0, **how) as bar:
        found = run_jobs(jobs, len(environments_on_cores(call.jobs)), bar)
    outcomes = dict(zip((job.file for job in jobs), found, strict=True))
    results = [result_of(one, outcomes, call) for one in every]
    for one, result in zip(every, results, strict=True):
        if call.train:
            add_training(one, result, call)
    for k, result in enumerate(results):
        others = [other for i, other in enumerate(results) if i != k]
        rows = references(others, shipped, result["label"], call.batches)
        files = write_report(result, rows, call.output)
        print(f"\n{result['label']}")
        for sentence in verdict(result, rows):
            print(f"- {sentence}")
        print("  ".join(map(str, files)))


if __name__ == "__main__":
    main()
