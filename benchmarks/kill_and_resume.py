"""Runs that are killed or terminated at random moments and resumed, compared with an uninterrupted run.

Each chain is one short run of the packaged policy (two optimiser steps a batch, a one-cycle schedule, a checkpoint
after each batch) that is ended several times, resumed with `--ckpt_path=last` and finally completed. Its weights,
optimiser state and exported policy are compared bit for bit with those of an uninterrupted run.

SIGKILL comes at a random moment of training, or when a checkpoint is seen to be half written; to the whole process
group as a scheduler does, to the first process alone, or (two ranks) to the second. The folder for temporary files lies
on another file system than the run. SIGTERM goes to the first process alone (Kubernetes) or to all (SLURM).

    python benchmarks/kill_and_resume.py            # 50 SIGKILLs, 10 SIGTERMs: a quarter of an hour on two cores

Processes that are left over 20 seconds after a signal are counted, and killed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import Run, all_gone, forked, members  # It sets the environment, which torch reads when it is imported.

# isort: split
import torch
from safetensors.torch import load_file

STEPS = 80
OPTIONS = f"""--config=configs/quickstart.yaml --trainer.max_steps={STEPS} --trainer.val_check_interval=20
--trainer.enable_progress_bar=false --trainer.enable_model_summary=false --last_checkpoint.every_n_batches=1
--model.sampling.max_response_length=6 --model.execution.group_size=2 --model.objective.entropy_coefficient=0.1
--model.objective.mask_truncated=false --model.scheduler=OneCycleLR --model.scheduler.max_lr=3e-4
--model.scheduler.total_steps={STEPS + 1} --evaluation.sampling.max_response_length=6
--data.num_train=24 --data.num_val=2 --data.num_test=2
--data.prompts_per_batch=2 --data.eval_prompts_per_batch=2""".split()
RUN = Path("runs/quickstart")


@dataclass
class Chain:
    """A run with its signals and resumes.

    Attributes:
        folder: Where it runs.
        ranks: Processes.
        temporary: Its folder for temporary files.
    """

    folder: Path
    ranks: int
    temporary: Path

    @property
    def last(self) -> Path:
        """The file of the last checkpoint."""
        return self.folder / RUN / "checkpoints" / "last.ckpt"

    def start(self) -> Run:
        """Begin, or go on."""
        resume = ["--ckpt_path=last"] if self.last.exists() else []
        arguments = ["fit", *OPTIONS, f"--trainer.devices={self.ranks}", *resume]
        return forked(self.folder, arguments, temporary=self.temporary)

    def said(self) -> str:
        """What the last process wrote to stderr."""
        return (self.folder / "stderr.txt").read_text()

    def step(self) -> int | str:
        """The step of the checkpoint, which is read completely."""
        if not self.last.exists():
            return "none"
        try:
            return int(torch.load(self.last, weights_only=True)["global_step"])
        except Exception as error:
            return f"TORN ({type(error).__name__})"


def second_rank(group: int) -> int | None:
    """The process that Lightning has started for rank 1."""
    for pid in members(group):
        try:
            ranked = b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
            if ranked and b"grail_lightning.answers" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    return None


def wait_for_save(chain: Chain, process: Run) -> None:
    """Until this process has written its first checkpoint."""
    before = chain.last.stat().st_mtime_ns if chain.last.exists() else 0
    while process.poll() is None and (not chain.last.exists() or chain.last.stat().st_mtime_ns == before):
        time.sleep(0.01)


def wait_for_half(chain: Chain, process: Run) -> None:
    """Until a checkpoint is half written."""
    part = chain.last.with_name("last.ckpt.part")
    while process.poll() is None:
        try:
            if part.stat().st_size > 0:
                return
        except FileNotFoundError:
            pass


def disturb(chain: Chain, how: signal.Signals, whom: str, half: bool, delay: float) -> dict[str, Any]:
    """Start a run, wait for the moment, send the signal, and return the result."""
    process = chain.start()
    wait_for_save(chain, process)
    time.sleep(delay)
    if half:
        wait_for_half(chain, process)
    if process.poll() is not None:
        return {"counted": False, "code": process.returncode, "left": 0, "torn": False, "line": "it had ended before"}
    if whom == "all":
        os.killpg(process.pid, how)
    else:
        target = process.pid if whom == "first" else second_rank(process.pid)
        assert target is not None
        os.kill(target, how)
    process.wait()
    seconds, left = all_gone(process.pid)
    parts = len(list(chain.last.parent.glob("*.part")))
    step = chain.step()
    line = f"exit code {process.returncode}, all gone after {seconds:.1f} s, {left} left over, "
    line += f"half-written files {parts}, last.ckpt of step {step}"
    right = how == signal.SIGKILL or (
        process.returncode == 143
        and f"Ended by SIGTERM at step {step}; " in chain.said()
        and "ckpt_path" in chain.said()
    )
    torn = isinstance(step, str) and step.startswith("TORN")
    return {"counted": True, "left": left, "torn": torn, "half": parts > 0, "right": right, "line": line}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal bit for bit, through dictionaries and lists."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def outcome(chain: Chain) -> dict[str, Any]:
    """The state of a completed run that is compared."""
    process = chain.start()
    process.wait()
    assert process.returncode == 0, chain.said()[-2000:]
    left = all_gone(process.pid)[1]
    parts = list(chain.last.parent.glob("*.part"))
    assert not left
    assert not parts
    checkpoint = torch.load(chain.last, weights_only=True)
    found = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    return found | {"export": load_file(chain.folder / RUN / "export" / "model.safetensors")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs")
    parser.add_argument("--terms", type=int, default=10, help="SIGTERMs")
    parser.add_argument("--per_chain", type=int, default=10, help="SIGKILLs that one run gets; SIGTERMs half as many")
    parser.add_argument("--two_ranks", type=int, nargs="*", default=[1, 3], help="chains that run on two ranks")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    places = [Path(tempfile.mkdtemp(dir=where)) for where in (tempfile.gettempdir(), "/dev/shm")]
    print(f"runs in {places[0]} (device {os.stat(places[0]).st_dev}) and {places[1]} ({os.stat(places[1]).st_dev})")
    undisturbed = {}
    for ranks in (1, 2) if args.two_ranks else (1,):
        folder = places[0] / f"undisturbed{ranks}"
        folder.mkdir()
        start = time.monotonic()
        undisturbed[ranks] = outcome(Chain(folder, ranks, places[1]))
        print(f"undisturbed, {ranks} process(es): {time.monotonic() - start:.0f} s", flush=True)
    total = {"signals": 0, "while writing": 0, "torn": 0, "left over": 0, "not as promised": 0, "different": 0}
    few = max(1, args.per_chain // 2)
    kills = [(signal.SIGKILL, min(args.per_chain, args.kills - k)) for k in range(0, args.kills, args.per_chain)]
    terms = [(signal.SIGTERM, min(few, args.terms - k)) for k in range(0, args.terms, few)]
    order = kills[:1] + terms + kills[1:]
    waiting = [(how, wanted, 2 if number in args.two_ranks else 1) for number, (how, wanted) in enumerate(order)]
    for number in itertools.count():
        if not waiting:
            break
        how, wanted, ranks = waiting.pop(0)
        here, there = places if number % 2 else places[::-1]
        chain = Chain(here / f"chain{number}", ranks, there)
        chain.folder.mkdir()
        sent = 0
        while sent < wanted:
            half = how == signal.SIGKILL and sent % 2 == 1
            whom = rng.choice(["all", "first"] + (["second"] if ranks == 2 and how == signal.SIGKILL else []))
            found = disturb(chain, how, whom, half, rng.uniform(0, 0.8))
            moment = "while writing" if half else "any moment"
            print(f"chain {number}, {ranks} process(es), {how.name} to {whom}, {moment}: {found['line']}", flush=True)
            if not found["counted"]:  # On a fast machine a run may be complete too early: another one gets the rest.
                waiting.append((how, wanted - sent, ranks))
                break
            sent += 1
            total["signals"] += 1
            total["while writing"] += found["half"]
            total["torn"] += found["torn"]
            total["left over"] += found["left"]
            total["not as promised"] += not found["right"]
        equal = same(outcome(chain), undisturbed[ranks])
        total["different"] += not equal
        print(f"chain {number} came to its end: {'the same, bit for bit' if equal else 'DIFFERENT'}", flush=True)
        shutil.rmtree(chain.folder)
    for place in places:
        shutil.rmtree(place)
    print(", ".join(f"{name}: {count}" for name, count in total.items()))


if __name__ == "__main__":
    main()
