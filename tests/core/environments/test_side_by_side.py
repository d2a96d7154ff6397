"""The tools of many rollouts at the same time: order, time limits, and processes that end while their tools hang."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.side_by_side import side_by_side
from tests.core.environments.test_tools import DESK, HOSTILE, Desk, Hostile, run


def test_rollouts_run_side_by_side_and_the_calls_of_one_in_their_order():
    waits = [0.3, 0.0, 0.25, 0.3, 0.2, 0.28]
    rollouts = [
        (HOSTILE, Hostile(), [ParsedCall("do", {"what": "wait", "which": wait}), ParsedCall("fly")]) for wait in waits
    ]
    rollouts.insert(3, (HOSTILE, Hostile(), []))
    rollouts.append((DESK, Desk(), [ParsedCall("add", {"number": n, "times": n}) for n in range(1, 9)]))
    began = time.monotonic()
    made = run(rollouts)
    assert time.monotonic() - began < 1.1  # The slowest takes 0.3, all together 1.33.
    assert [call.result for call in made.pop()] == [f"The sum is {n}." for n in (1, 5, 14, 30, 55, 91, 140, 204)]
    assert made.pop(3) == ()
    assert [calls[0].result for calls in made] == [f"waited {wait}" for wait in waits]
    assert [calls[1].status for calls in made] == ["invalid"] * 6
    assert all(calls[0].seconds >= wait for calls, wait in zip(made, waits, strict=True))


def test_no_more_threads_than_asked_run_at_a_time():
    running, most, lock = 0, 0, threading.Lock()

    def step():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return threading.current_thread().daemon

    outcomes = side_by_side([step] * 18, [5.0] * 18, threads=3)
    assert most == 3
    assert all(outcome.value for outcome in outcomes)


@pytest.mark.no_cover  # Traced threads are not ended.
def test_a_tool_that_hangs_takes_its_limit_once_and_its_rollout_alone():
    waits = [ParsedCall(name, {"what": "wait", "which": 0.2}) for name in ("do", "do_later")]
    calls = {
        "hangs": [ParsedCall("do", {"what": "wait", "which": 30.0}), *waits],
        "spins": [ParsedCall("do", {"what": "spin"})],
        "hangs in the loop": [waits[0], ParsedCall("do_later", {"what": "wait", "which": 30.0})],
        "blocks the loop": [ParsedCall("do_later", {"what": "block", "which": 20.0})],
        "well": waits,
    }
    worlds = {name: Hostile() for name in calls}
    began = time.monotonic()
    made = run([(HOSTILE, worlds[name], calls[name]) for name in calls], tool_seconds=0.6)
    assert time.monotonic() - began < 3.5
    made = {name: [(c.status, c.result) for c in own] for name, own in zip(calls, made, strict=True)}
    late = "timeout", "Error: the tool did not return within 0.6 seconds."
    lost = "failed", "Error: it was not run, since a call before it did not return."
    assert made["hangs"] == [late, lost, lost]
    assert made["spins"] == made["blocks the loop"] == [late]
    assert made["hangs in the loop"] == [("done", "waited 0.2"), late]
    assert made["well"] == [("done", "waited 0.2")] * 2
    assert worlds["spins"].stopped.wait(5), "an endless loop is ended, else it would slow down the training"
    assert worlds["hangs in the loop"].stopped.wait(5), "a coroutine is cancelled"


PROGRAM = """
import asyncio, sys, time
from grail_lightning.core.environments.side_by_side import awaited, side_by_side

async def block():
    time.sleep(1e6)

functions = [lambda: time.sleep(1e6), lambda: awaited(asyncio.sleep(1e6)), lambda: awaited(block())]
print("begin", flush=True)
try:
    print([one.status for one in side_by_side(functions, [float(sys.argv[1])] * 3, threads=3)])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_ends_while_its_tools_sleep_for_ever(interrupted):
    seconds = "1000" if interrupted else "0.3"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, seconds],
        cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "begin\n"
        if interrupted:
            while len(list(Path(f"/proc/{process.pid}/task").iterdir())) < 5:  # Three calls, the loop, the main thread.
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (out, err, process.returncode) == (
        "interrupted\n" if interrupted else f"{['timeout'] * 3}\n", "", 0,
    )  # fmt: skip
