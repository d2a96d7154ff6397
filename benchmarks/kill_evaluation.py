"""A `test` that is killed at random moments and started again, compared with one that nothing disturbs.

The packaged policy answers sums, several samples each, in many small batches. SIGKILL comes at a random moment, to all
processes of the test; the same command then goes on. After every other kill a file is cut inside its last line, as a
kill in the middle of a write would leave it. At the end the printed table and every line of the kept samples must be
those of the undisturbed test, none lost and none doubled.

    python benchmarks/kill_evaluation.py            # ten kills on one process, ten on two: three minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from forks import Run, all_gone, forked

from grail_lightning.evaluate import read_samples

SAMPLES = Path("runs/quickstart/test/samples")
OPTIONS = [
    "--config=configs/quickstart.yaml",
    "--trainer.enable_progress_bar=false",
    "--evaluation.num_samples=3",
    "--evaluation.pass_at=[1,3]",
    "--evaluation.maj_at=[3]",
    "--evaluation.sampling.max_response_length=44",
    "--data.eval_prompts_per_batch=4",
]


def start(folder: Path, ranks: int, problems: int) -> Run:
    """Begin the test, or go on with it."""
    arguments = ["test", *OPTIONS, f"--data.num_test={problems}", f"--trainer.devices={ranks}"]
    return forked(folder, arguments, output="stdout.txt")


def complete(folder: Path, ranks: int, problems: int) -> tuple[str, list[str], float]:
    """Run the test to its end: the table, the samples in the order of the data, and the seconds."""
    began = time.monotonic()
    run = start(folder, ranks, problems)
    run.wait()
    assert run.returncode == 0, (folder / "stderr.txt").read_text()[-2000:]
    all_gone(run.pid)
    said = (folder / "stdout.txt").read_text()
    rows = sorted((s.dataset, s.index, s.sample, repr(s)) for s in read_samples(folder / SAMPLES))
    return said[said.index("problems") :], [row[-1] for row in rows], time.monotonic() - began


def lines_in(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in (folder / SAMPLES).glob("rank_*.jsonl"))


def kill_at(folder: Path, ranks: int, problems: int, moment: float, wanted: int, *, tear: bool) -> str:
    """Start, wait until a share of the remaining samples is there and a little longer, kill; what was left."""
    run, before = start(folder, ranks, problems), lines_in(folder)
    goal, deadline = before + moment * (wanted - before), time.monotonic() + 60
    while run.poll() is None and lines_in(folder) < goal and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.05))
    if run.poll() is not None:
        return f"it had ended before (exit code {run.returncode})"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    all_gone(run.pid)
    files = [file for file in (folder / SAMPLES).glob("rank_*.jsonl") if file.stat().st_size]
    if tear and files:
        file = random.choice(files)
        os.truncate(file, file.stat().st_size - random.randint(1, 200))
    torn = sum(not file.read_bytes().endswith(b"\n") for file in files)
    return f"killed at {lines_in(folder)} of {wanted} samples, {torn} torn lines"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--problems", type=int, default=203)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    place = Path(tempfile.mkdtemp())
    different = 0
    for ranks in options.ranks:
        whole, cut = place / f"whole{ranks}", place / f"cut{ranks}"
        for folder in (whole, cut):
            folder.mkdir()
        table, rows, seconds = complete(whole, ranks, options.problems)
        print(f"{ranks} process(es), undisturbed: {len(rows)} samples in {seconds:.0f} s\n{table}", flush=True)
        for number in range(options.kills):
            # Later kills come later, so that all of them find something left to do.
            moment = random.uniform(0, 1.5 / (options.kills - number + 1))
            print(
                f"kill {number + 1}: {kill_at(cut, ranks, options.problems, moment, len(rows), tear=number % 2 == 1)}",
                flush=True,
            )
        again, found, seconds = complete(cut, ranks, options.problems)
        identities = [tuple(json.loads(line).get(k) for k in ("dataset", "index", "sample")) for file in
                      (cut / SAMPLES).glob("rank_*.jsonl") for line in file.read_text().splitlines()]  # fmt: skip
        doubled, lost = len(identities) - len(set(identities)), len(rows) - len(set(identities))
        same = again == table and found == rows
        different += not same
        print(f"the last start took {seconds:.0f} s; {lost} samples lost, {doubled} doubled; "
              f"table and samples {'the same' if same else 'DIFFERENT'}\n", flush=True)  # fmt: skip
    shutil.rmtree(place)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
