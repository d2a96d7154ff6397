"""The executor under load: programs, a tenth of them hostile, while sandboxes are killed at random; and its figures.

    python benchmarks/executor_load.py                    # each isolation that runs here, 2,000 programs
    python benchmarks/executor_load.py --isolations Sandlock --programs 200 --kill-every 0

Every verdict is compared with what is known of the program. The speed is that of programs with 5 tests each, without
attacks, in five turns; a bare `python -S -c pass` stands beside it, for what else the machine does changes all figures.
"""

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import threading
import time

import psutil

from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, TestCall, Tests
from grail_lightning.worlds.programs.probe import LOCAL, refusal

PROGRAM = "def f(n, m):\n    s = 0\n    for i in range(n):\n        if i {} m:\n            s += i\n    return s  # {}"
CALLS = tuple(TestCall((n, 3), sum(i for i in range(n) if i <= 3)) for n in range(5))
ASSERTIONS = tuple(f"assert f{call.arguments} == {call.result}" for call in CALLS)
HOSTILE = {
    "while True: pass\n# {}": {"timeout"},
    "def f(n, m):\n    a = []\n    while True: a.append('x' * 10**6 + str(len(a)))\n# {}": {"memory", "timeout"},
    "import os\ndef f(n, m): os._exit(0)\n# {}": {"crashed"},
    "import os\ndef f(n, m):\n    while True: os.fork()\n# {}": {"raised"},
    "def f(n, m):\n    while True: print('x' * 1000)\n# {}": {"output"},
    "class A(int):\n    __eq__ = lambda a, b: True\ndef f(n, m): return A()\n# {}": {"failed"},
    "def f(n, m): return f(n, m)\n# {}": {"raised"},
    "import ctypes\ndef f(n, m): return ctypes.string_at(0)\n# {}": {"crashed", "raised"},
}


def name_of(isolation):
    """The name of its class."""
    return type(isolation).__name__


def jobs_of(num_programs, rng):
    """Jobs, and the statuses that each may have."""
    jobs, allowed = [], []
    for index in range(num_programs):
        tests = Tests("f", CALLS) if index % 3 else Tests("f", (), ASSERTIONS)
        if index % 10 == 0:
            source = rng.choice(list(HOSTILE))
            jobs.append(Job(source.replace("{}", str(index)), tests))
            allowed.append(HOSTILE[source])
        else:
            jobs.append(Job(PROGRAM.format("<=" if index % 2 else "<", index), tests))
            allowed.append({"passed"} if index % 2 else {"failed"})
    return jobs, allowed


def processes() -> list[psutil.Process]:
    """Those that this process started, and theirs."""
    return psutil.Process().children(recursive=True)


def memory_mb(running: list[psutil.Process]) -> float:
    """Resident memory of processes."""
    total = 0
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20


def load(isolation, num_programs, kill_every):
    """Wrong verdicts, kills and memory of a run under attack."""
    rng = random.Random(0)
    executor = Executor(isolation, ProgramLimits(seconds=1.0, memory_mb=128))
    jobs, allowed = jobs_of(num_programs, rng)
    stop, kills, memory, wrong = threading.Event(), 0, [], []

    def kill():
        nonlocal kills
        while not stop.wait(kill_every):
            if targets := processes():
                kills += 1
                with contextlib.suppress(psutil.NoSuchProcess):
                    rng.choice(targets).kill()

    if kill_every:
        threading.Thread(target=kill, daemon=True).start()
    begin = time.perf_counter()
    for start in range(0, num_programs, 128):
        outcomes = executor.run_many(jobs[start : start + 128])
        pairs = zip(outcomes, allowed[start : start + 128], jobs[start : start + 128], strict=True)
        wrong += [(outcome, job[0]) for outcome, statuses, job in pairs if outcome.status not in statuses]
        memory.append((memory_mb([psutil.Process()]), memory_mb(processes())))
    stop.set()
    seconds = time.perf_counter() - begin
    executor.close()
    time.sleep(0.5)
    third = max(1, len(memory) // 3)
    own, theirs = (
        " → ".join(f"{statistics.median(part):.0f}" for part in (column[:third], column[-third:]))
        for column in zip(*memory, strict=True)
    )
    name = name_of(isolation)
    print(f"{name}: {num_programs} programs in {seconds:.0f} s, {kills} kills, {len(wrong)} wrong verdicts")
    print(f"  memory of this process {own} MB, of the sandboxes {theirs} MB (first, last third); ", end="")
    print(f"{len(processes())} processes left", flush=True)
    for outcome, source in wrong[:5]:
        print(f"  {outcome.status}: {outcome.message} | {source[:60]!r}")
    return not wrong


def seconds_of(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def speed(isolation):
    """Start-up, programs a second with calls and with assertions, and a bare interpreter, in turns."""
    bare, starts, rates, executor = [], [], {"calls": [], "assertions": []}, Executor(isolation)
    interpreter = [sys.executable, "-S", "-c", "pass"]
    for turn in range(5):
        bare.append(statistics.median(seconds_of(lambda: subprocess.run(interpreter, check=True)) for _ in range(5)))
        sandbox = isolation.open(ProgramLimits())
        starts.append(seconds_of(sandbox._start))
        sandbox.close()
        for kind, tests in {"calls": Tests("f", CALLS), "assertions": Tests("f", (), ASSERTIONS)}.items():
            jobs = [Job(PROGRAM.format("<=", (turn, kind, index)), tests) for index in range(128)]
            executor.run_many(jobs[:8])
            rates[kind].append(120 / seconds_of(lambda jobs=jobs: executor.run_many(jobs[8:])))
    executor.close()
    ratio = statistics.median(2 / (rate * one) for rate, one in zip(rates["calls"], bare, strict=True))
    calls, assertions = (statistics.median(rates[kind]) for kind in ("calls", "assertions"))
    start, own = (1000 * statistics.median(times) for times in (starts, bare))
    name = name_of(isolation)
    print(f"{name}: start {start:.0f} ms; {calls:.0f} programs/s with calls, {assertions:.0f} with assertions")
    print(f"  2 workers; a program costs {ratio:.2f} of a bare interpreter's start ({own:.0f} ms)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    isolations = {name_of(isolation): isolation for isolation in LOCAL}
    parser.add_argument("--isolations", nargs="+", choices=isolations, default=list(isolations))
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds between kills of a process; 0: none")
    arguments = parser.parse_args()
    right = True
    for name in arguments.isolations:
        if reason := refusal(isolations[name]):
            print(f"{name}: not here ({reason})")
            continue
        speed(isolations[name])
        right &= load(isolations[name], arguments.programs, arguments.kill_every)
    sys.exit(not right)


if __name__ == "__main__":
    main()
