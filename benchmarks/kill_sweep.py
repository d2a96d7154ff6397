"""A sweep that is killed at random moments and called again, compared with one that is not disturbed.

    python benchmarks/kill_sweep.py                # 10 SIGKILLs: five minutes on two free cores
    python benchmarks/kill_sweep.py --kills 2      # a quick look

The sweep has three methods and two seeds on short runs of the packaged policy, with a checkpoint after each batch.
SIGKILL goes to the sweep alone, or to it and to all processes that it has started, as a machine without memory or a
scheduler does. The call after a kill comes at once, while runs of the killed one may still be ending. In the end the
tables (held-out accuracy of each run over training) and the exported weights of all runs are compared bit for bit, and
the folders are counted. While it runs, processes that train in the same folder at the same time are counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["PYTHONPATH"] = sys.path[0]

import torch
import yaml
from safetensors.torch import load_file

from grail_lightning.evaluate.curves import read_scalars

STUDY = {
    "config": "configs/quickstart.yaml",
    "folder": "study",
    "options": {
        "trainer.max_steps": 40,
        "trainer.val_check_interval": 5,
        "model.sampling.max_response_length": 44,
        "model.execution.group_size": 4,
        "evaluation.sampling.max_response_length": 44,
        "data.num_train": 160,
        "data.num_val": 64,
        "data.num_test": 8,
        "data.prompts_per_batch": 4,
        "last_checkpoint.every_n_batches": 1,
    },
    "methods": {
        "GRPO": {"model.credit": "Uniform"},
        "GRAIL": {"model.credit": "GRAIL"},
        "GRAIL shuffled": {"model.credit": "GRAIL", "model.control": "Shuffled"},
    },
    "tasks": {"sums": {}},
    "seeds": [0, 1],
}
RUNS = {f"{name.replace(' ', '_')}__sums__{seed}" for name in STUDY["methods"] for seed in STUDY["seeds"]}


class Sweep:
    """Calls of one sweep.

    Args:
        folder: Where its file and its runs are.
        jobs: Runs at once.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self.jobs = folder, jobs
        self.most = Counter()
        folder.mkdir(parents=True)
        (folder / "study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))

    def call(self) -> subprocess.Popen:
        """Start a call."""
        command = [sys.executable, "-m", "grail_lightning.sweep", "study.yaml", f"--jobs={self.jobs}"]
        with (self.folder / "sweep.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)

    def said(self) -> str:
        """What all calls have printed."""
        log = self.folder / "sweep.log"
        return log.read_text() if log.exists() else ""

    def fits(self) -> list[tuple[int, str]]:
        """The processes that train runs of this sweep, each with the name of its run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                here = os.readlink(entry / "cwd") == str(self.folder)
            except OSError:
                continue
            if here and "fit" in words:
                logger = next(word for word in words if word.startswith("--trainer.logger="))
                found.append((int(entry.name), json.loads(logger.partition("=")[2])["init_args"]["name"]))
        return found

    def watch(self, over: threading.Event) -> None:
        """Note how many processes train in the same folder at the same time, until `over`."""
        while not over.wait(0.05):
            for name, number in Counter(name for _, name in self.fits()).items():
                self.most[name] = max(self.most[name], number)

    def table(self) -> dict[str, dict[int, float]]:
        """Held-out accuracy of each run, by the step."""
        return {name: read_scalars(self.folder / "study" / name, "val/accuracy") for name in sorted(RUNS)}

    def weights(self) -> dict[str, torch.Tensor]:
        """The exported weights of all runs."""
        files = {name: self.folder / "study" / name / "export" / "model.safetensors" for name in sorted(RUNS)}
        return {f"{name}/{key}": value for name, file in files.items() for key, value in load_file(file).items()}

    def attempts(self) -> dict[str, int]:
        """How often each run was started; only runs that are finished are there."""
        files = {name: self.folder / "study" / name / "sweep.json" for name in RUNS}
        records = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        return {name: record["attempts"] for name, record in records.items() if record["state"] == "finished"}


def killed(sweep: Sweep, rng: random.Random, number: int, longest: float) -> bool:
    """Call the sweep and kill it at a random moment; False if it had ended before.

    The moment is counted from the call's first run, or for each fifth kill from the call itself, which reads for
    seconds before it starts a run.
    """
    said = sweep.said().count(": started")
    process, start = sweep.call(), time.monotonic()
    while number % 5 != 4 and process.poll() is None and sweep.said().count(": started") == said:
        time.sleep(0.02)
    try:
        process.wait(rng.uniform(0, longest))
    except subprocess.TimeoutExpired:
        delay, everything = time.monotonic() - start, number % 2 == 1
        running = sweep.fits()
        process.kill()
        for pid, _ in running if everything else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        whom = "it and its runs" if everything else "it alone"
        names = ", ".join(name for _, name in running) or "none"
        done = len(sweep.attempts())
        print(f"kill {number + 1}: {whom}, after {delay:.1f} s, {done} of 6 finished; ran: {names}", flush=True)
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument(
        "--longest", type=float, help="most seconds from a run's start to the kill (default: half a run)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, place = random.Random(args.seed), Path(tempfile.mkdtemp()).resolve()
    undisturbed, disturbed = Sweep(place / "undisturbed", args.jobs), Sweep(place / "disturbed", args.jobs)
    start = time.monotonic()
    assert undisturbed.call().wait() == 0, (undisturbed.folder / "sweep.log").read_text()
    seconds = time.monotonic() - start
    longest = args.longest or seconds * args.jobs / len(RUNS) / 2  # Half a run, so that there are runs left to kill.
    print(f"undisturbed: {seconds:.0f} s; kills within {longest:.0f} s of a call's first run", flush=True)
    over = threading.Event()
    watcher = threading.Thread(target=disturbed.watch, args=(over,))
    watcher.start()
    kills = 0
    while kills < args.kills and killed(disturbed, rng, kills, longest):
        kills += 1
    code = disturbed.call().wait()
    over.set()
    watcher.join()
    assert code == 0, (disturbed.folder / "sweep.log").read_text()
    ours, theirs = disturbed.weights(), undisturbed.weights()
    there = {entry.name for entry in (disturbed.folder / "study").iterdir() if not entry.name.startswith(".")}
    attempts = disturbed.attempts()
    figures = {
        "kills": kills,
        "runs lost": len(RUNS - attempts.keys()),
        "folders too many": len(there - RUNS),
        "most processes in one folder": max(disturbed.most.values()),
        "attempts": sum(attempts.values()),
        "tables differ": disturbed.table() != undisturbed.table(),
        "weights differ": sum(not torch.equal(ours[name], theirs[name]) for name in theirs),
    }
    if not figures["tables differ"]:
        shutil.rmtree(place)
    print(", ".join(f"{name}: {value}" for name, value in figures.items()))
    right = figures["runs lost"] == figures["folders too many"] == figures["weights differ"] == 0
    raise SystemExit(not (right and figures["most processes in one folder"] == 1 and not figures["tables differ"]))


if __name__ == "__main__":
    main()
