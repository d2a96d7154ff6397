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
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt
from tqdm import tqdm

from grail_lightning import __version__
from grail_lightning.app.benchmark import training
from grail_lightning.app.benchmark.digest import code_digest
from grail_lightning.app.benchmark.processes import Job, run_jobs
from grail_lightning.app.benchmark.report import write_report
from grail_lightning.app.benchmark.result import board_results, read_result, write_result
from grail_lightning.app.benchmark.subjects import subject_of
from grail_lightning.app.benchmark.verdict import verdict
from grail_lightning.app.benchmark.worlds import DEFAULT_WORLDS, WORLDS
from grail_lightning.app.cli.mistakes import mistakes_in_one_line
from grail_lightning.core.runtime.files import check_writable, held

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
        "--worlds", nargs="+", choices=[*WORLDS], default=[*DEFAULT_WORLDS], metavar="WORLD", help=f"of {', '.join(WORLDS)} (default: {' '.join(DEFAULT_WORLDS)})"
    )
    made.add_argument("--against", nargs="+", default=[], metavar="METHOD", help="further methods to measure and show beside it, with their default options")
    made.add_argument("--batches", type=PositiveInt, default=BATCHES, help=f"of 128 stored rollouts of each world (default: {BATCHES})")
    made.add_argument("--train", action="store_true", help="train with the method, too: some ten minutes and more a world")
    made.add_argument("--seeds", type=PositiveInt, default=6, help="of training (default: 6)")
    made.add_argument("--seed", type=NonNegativeInt, default=0, help="of what methods draw at random (default: 0)")
    made.add_argument("--jobs", type=PositiveInt, default=None, help="processes at once (default: one for each core)")
    made.add_argument("--output", type=Path, default=Path("benchmark"), help="the folder of reports and of what is kept (default: benchmark)")
    return made
