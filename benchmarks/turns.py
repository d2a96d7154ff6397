"""Programs that take their steps in turn, each in a process of its own. Other benchmarks use this module.

The driver writes a line to a worker's standard input when it is its turn, and reads one line of JSON after each step.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


class Turns:
    """The worker's end of the pipe: it waits for its turn and reports the seconds and the memory of its step.

    Peak memory is what PyTorch has allocated on a GPU. On a CPU it is the largest resident size over that before the
    first step (weights loaded, no gradients yet).

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str = "cpu") -> None:
        self._wire = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # The output of libraries must not get into the pipe.
        self._cuda = device == "cuda"
        self._before: float | None = None
        self._start = self._start_cpu = 0.0

    def begin(self) -> None:
        if not sys.stdin.readline():  # The driver has ended.
            os._exit(1)
        if self._before is None:
            self._before = self._first()
        self._start, self._start_cpu = self._now(), time.process_time()

    def end(self, *, sample: float, grade: float, tokens: int, reward: float) -> None:
        """Everything but sampling and grading is the update; credit is none on both sides."""
        seconds, cpu = self._now() - self._start, time.process_time() - self._start_cpu
        assert self._before is not None
        lap = {"step": seconds, "cpu": cpu, "sample": sample, "grade": grade, "update": seconds - sample - grade}
        lap |= {"tokens": tokens, "reward": reward, "peak": self._peak() - self._before}
        print(json.dumps(lap), file=self._wire, flush=True)

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _first(self) -> float:
        """Reset the peak of loading; MiB that do not count."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return 0.0
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if self._cuda else _resident("VmHWM")


def _resident(field: str) -> float:
    """In MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Worker:
    """The driver's end of the pipe.

    Args:
        name: What the side is called.
        command: The program.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def step(self) -> dict[str, float]:
        """One step.

        Raises:
            SystemExit: If the program has stopped, with the end of what it said.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name} stopped:\n{self._log.read()[-3000:]}")
        lap: dict[str, float] = json.loads(line)
        return lap

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._log.close()


def take_turns(workers: list[Worker], rounds: int, warm_up: int) -> list[list[dict[str, float]]]:
    """The laps of each worker, in rounds that begin with another one each time. Rounds to warm up do not count."""
    laps: list[list[dict[str, float]]] = [[] for _ in workers]
    for number in range(rounds + warm_up):
        turn = number % len(workers)
        for which in [*range(turn, len(workers)), *range(turn)]:
            lap = workers[which].step()
            if number >= warm_up:
                laps[which].append(lap)
    for worker in workers:
        worker.close()
    return laps
