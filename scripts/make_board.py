"""Measure the methods of the package by the benchmark, and write their results, from which the board is made.

    python scripts/make_board.py build/board                        # all rows in the default worlds: two hours
    python scripts/make_board.py build/board --rows GRAIL OAR-G --worlds sums search
    python scripts/add_to_board.py build/board/rows/*.json

Called again, the script goes on. A row has the worlds that are measured, and the trainings of docs/results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from grail_lightning.app.benchmark.main import BATCHES, Judged, jobs_of, judged, put_training, request_of, result_of
from grail_lightning.app.benchmark.processes import run_jobs
from grail_lightning.app.benchmark.references import REFERENCES
from grail_lightning.app.benchmark.result import Result, file_name
from grail_lightning.app.benchmark.training import estimate, train
from grail_lightning.app.benchmark.worlds import DEFAULT_WORLDS, WORLDS
from grail_lightning.core.runtime.files import write_whole

ROWS = [name for name, reference in REFERENCES.items() if reference.role != "control"]
"""Controls are measured with the methods that they are controls of."""


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", nargs="+", choices=list(REFERENCES), default=ROWS, metavar="ROW")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(DEFAULT_WORLDS), metavar="WORLD")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only-write", action="store_true", help="measure nothing: write rows of what is measured")
    parser.set_defaults(batches=BATCHES, seed=0, seeds=6, arms="all")
    call = parser.parse_args()
    worlds = {name: [world for world in call.worlds if world in REFERENCES[name].worlds] for name in call.rows}
    rows = {}
    for name in call.rows:
        call.worlds = worlds[name]
        rows[name] = judged(name, [], call)
    jobs = jobs_of(rows.values())
    if not call.only_write:
        with tqdm(total=sum(job.units for job in jobs), mininterval=30) as bar:
            run_jobs(jobs, call.jobs, bar, reuse=True)
    for name in rows:
        call.worlds = [world for world in worlds[name] if all(job.kept() for job in rows[name].jobs[world])]
        if call.worlds:
            row = judged(name, [], call)
            outcomes = {job.file: job.kept() for job in jobs_of([row])}
            result = result_of(row, outcomes, call)
            if REFERENCES[name].credit is not None:
                add_recorded(row, result, call)
            write_whole(call.output / "rows" / f"{file_name(name)}.json", json.dumps(result, indent=1) + "\n")


def add_recorded(row: Judged, result: Result, call: argparse.Namespace) -> None:
    """Add the trainings of the package's studies, where they have the method, as one family of comparisons."""
    applies = [world for world, figures in result["worlds"].items() if figures]
    if recorded := [world for world in applies if estimate(request_of(row, [world], call)) == 0]:
        put_training(train(request_of(row, recorded, call), say=print), result)


if __name__ == "__main__":
    main()
