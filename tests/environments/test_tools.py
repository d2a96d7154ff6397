"""Tools of environments: their schemas and checks, calls that are hostile in every way, many rollouts side by side.

The peer is TRL: its trainer is built on one of these classes, and its own loop calls the tools.
"""

import asyncio
import inspect
import json
import signal
import subprocess
import sys
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from grail_lightning.environments import (
    ParsedCall,
    ToolSet,
    call_reset,
    call_reward,
    call_score,
    call_state,
    check_columns,
    result_text,
    run_calls,
    side_by_side,
)

LIMITS = {"seconds": 5.0, "max_characters": 2000}


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Desk:
    """An environment as TRL takes it, with all the types that a schema knows."""

    def __init__(self):
        self.log = []

    def reset(self, number: int = 0, **columns: Any) -> str:
        self.log = [number]
        return f"Number {number}."

    def add(self, number: int, times: int = 1) -> str:
        """Add a number.

        Args:
            number: What is added.
            times: How often.
        """
        self.log.append(number * times)
        return f"The sum is {sum(self.log)}."

    def show(
        self,
        text: str,
        share: float = 0.5,
        loud: bool = False,
        mood: Mood = Mood.GOOD,
        unit: Literal["m", "km", 1] = "m",
        at: int | None = None,
        either: int | str = 0,
        words: list[str] = (),
        table: dict[str, list[int]] | None = None,
        colour: str = "red",
        anything: Any = None,
    ) -> str:
        """Say what came.

        Args:
            text: A text.
            share: A number.
            loud: A flag.
            mood: One of a few.
            unit: One of a few.
            at: A number or nothing.
            either: Of two types.
            words: Strings.
            table: Lists of numbers.
            colour: A colour (choices: ["red", "blue"])
            anything: Of any type.
        """
        return repr([*locals().values()][1:])

    async def ask(self, question: str) -> str:
        """Ask after a moment.

        Args:
            question: What to ask.
        """
        await asyncio.sleep(0.01)
        if question == "fail":
            raise LookupError("nobody knows")
        return f"{question}? {len(self.log)}"

    @staticmethod
    def even(number: int) -> str:
        """Whether a number is even.

        Args:
            number: A number.
        """
        if number < 0:
            raise ValueError("less than 0")
        return "yes" if number % 2 == 0 else "no"

    def get_reward(self) -> float:
        return float(sum(self.log))

    def _hidden(self) -> None: ...


class Unprintable:
    def __str__(self):
        raise OSError("no text")

    __repr__ = __str__


class UnprintableError(Exception):
    def __str__(self):
        raise SystemExit(3)


LOOP: dict = {}
LOOP["self"] = LOOP
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
VALUES = {
    "megabytes": "a" * 3_000_000,
    "megabytes of bytes": b"a" * 3_000_000,
    "megabytes of json": ["a" * 100] * 30_000,
    "bytes": b"ok\xff\x00\xc3\xa9",
    "surrogate": "a\ud800b",
    "control": "a\x00\x1b[31mb\r\n\tc\x7f\x9b",
    "nan": {"x": float("nan")},
    "loop": LOOP,
    "none": None,
    "number": 3,
    "list": ["ä", None, True],
    "tuples as keys": {(1, 2): 3},
    "deep": DEEP,
    "huge integer": 10**5000,
    "unprintable": Unprintable(),
    "unprintable inside": [Unprintable()],
}
ERRORS = [SystemExit(2), KeyboardInterrupt(), GeneratorExit(), OSError("x" * 5000), UnprintableError(), StopIteration()]


class Hostile:
    """Tools that do what tools must not."""

    def __init__(self):
        self.stopped = threading.Event()

    def reset(self): ...

    def give(self, name: str):
        """Return a value.

        Args:
            name: Its name.
        """
        return VALUES[name]

    def fail(self, number: int):
        """Raise an exception.

        Args:
            number: Which.
        """
        raise ERRORS[number]

    async def fail_later(self, number: int):
        """Raise an exception in the event loop.

        Args:
            number: Which.
        """
        raise ERRORS[number]

    def wait(self, seconds: float):
        """Wait outside Python code.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return f"waited {seconds}"

    def spin(self):
        """Compute for ever."""
        try:
            while True:
                pass
        finally:
            self.stopped.set()

    async def wait_later(self, seconds: float):
        """Wait in the event loop.

        Args:
            seconds: How long.
        """
        try:
            await asyncio.sleep(seconds)
        finally:
            self.stopped.set()
        return f"waited {seconds}"

    async def block(self, seconds: float):
        """Block the event loop.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)

    def change(self, values: list):
        """Change the arguments.

        Args:
            values: What is emptied.
        """
        values[0].clear()
        values.clear()
        return "changed"


DESK, HOSTILE = ToolSet(Desk), ToolSet(Hostile)


def one(tools, environment, name, /, **arguments):
    """The result of one call."""
    ((call,),) = run_calls(tools, [(environment, [ParsedCall(name, arguments)])], **LIMITS)
    return call


def test_the_tools_are_the_public_methods_of_a_class_or_an_instance():
    assert DESK.names == ["add", "ask", "even", "show"]
    assert ToolSet(Desk()).schemas == DESK.schemas
    assert json.loads(json.dumps(DESK.schemas)) == DESK.schemas

    class Scored(Desk):
        def score_turn(self): ...
        def state_key(self): ...

    assert ToolSet(Scored).names == DESK.names


def bare(self, number): ...


def undocumented(self, number: int):
    """A tool."""


def many(self, *numbers: int):
    """A tool.

    Args:
        numbers: Numbers.
    """


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"add": Desk.add}, "must have a method `reset`, but `World` has none. Write `def reset"),
        ({"reset": Desk.reset, "get_reward": bare}, "has no public method but `get_reward`, `reset`. Write one with"),
        ({"reset": Desk.reset, "tool": bare}, "`World.tool` cannot be described to the policy: .* has no docstring"),
        (
            {"reset": Desk.reset, "tool": undocumented},
            "`World.tool` .* no description for the argument 'number'",
        ),
        (
            {"reset": Desk.reset, "tool": many},
            "`World.tool` .* cannot be given by its name. Write them, or",
        ),
    ],
)
def test_a_class_that_is_no_environment_is_refused_in_one_line(methods, message):
    with pytest.raises(ValueError, match=message) as raised:
        ToolSet(type("World", (), methods))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "given", "got"),
    [
        *((name, value, value) for name, value in [
            ("text", "3"), ("share", 3), ("share", 0.25), ("loud", True), ("mood", "bad"), ("unit", 1), ("unit", "km"),
            ("at", None), ("at", 10**30), ("either", 2), ("either", "2"), ("table", None), ("colour", "blue"),
            ("anything", {"a": [1.5, "2", None]}),
        ]),
        ("text", 3, "3"), ("text", 2.5, "2.5"), ("share", " 1e3 ", 1000.0), ("loud", "true", True),
        ("loud", "False", False), ("unit", "1", 1), ("at", "-7", -7), ("at", 3.0, 3), ("at", "3.0", 3),
        ("at", "null", None), ("words", [1, "b"], ["1", "b"]), ("words", '["b"]', ["b"]),
        ("table", '{"a": ["1", 2.0]}', {"a": [1, 2]}),
    ],
)  # fmt: skip
def test_values_that_fit_stay_and_others_are_converted_where_nothing_is_lost(name, given, got):
    arguments = {"text": "t", name: given}
    call = one(DESK, Desk(), "show", **arguments)
    assert call.status == "done"
    shown = inspect.signature(Desk().show).bind(**arguments | {name: got})
    shown.apply_defaults()
    assert call.result == repr([*shown.arguments.values()])
    assert call.arguments == arguments


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fly", {}, "There is no tool 'fly'. The tools are: `add`, `ask`, `even`, `show`."),
        ("_hidden", {}, "There is no tool '_hidden'."),
        ("reset", {}, "There is no tool 'reset'."),
        ("__class__" + "x" * 5000, {}, "There is no tool '__class__xxx...xxxxxxxxxxxxx'."),
        ("add", {}, "`number` is missing. The tool is `add(number: integer, times: integer (optional))`."),
        ("add", {"number": 1, "self": 2}, "'self' is not a parameter."),
        ("add", {"number": 2.5}, "`number` must be integer, but got 2.5."),
        ("add", {"number": True}, "`number` must be integer, but got True."),
        ("add", {"number": "__import__('os')"}, "`number` must be integer, but got \"__import__('os')\"."),
        ("add", {"number": "1" * 5000}, "`number` must be integer, but got '111"),
        ("add", {"number": "[" * 100_000}, "`number` must be integer, but got '[[["),
        ("add", {"number": 1e300}, "`number` must be integer, but got 1e+300."),
        ("add", {"number": None}, "`number` must be integer, but got None."),
        ("show", {"text": ["a"]}, "`text` must be string, but got ['a']."),
        ("show", {"text": True}, "`text` must be string, but got True."),
        ("show", {"text": 10**5000}, "`text` must be string, but got a value of type `int`."),
        ("show", {"text": "", "share": float("nan")}, "`share` must be number, but got nan."),
        ("show", {"text": "", "share": "Infinity"}, "`share` must be number, but got 'Infinity'."),
        ("show", {"text": "", "loud": 1}, "`loud` must be boolean, but got 1."),
        ("show", {"text": "", "at": 2.5}, "`at` must be integer or null, but got 2.5."),
        ("show", {"text": "", "mood": "sad"}, '`mood` must be one of ["good", "bad"], but got \'sad\'.'),
        ("show", {"text": "", "unit": True}, '`unit` must be one of ["m", "km", 1], but got True.'),
        ("show", {"text": "", "either": []}, "`either` must be integer or string, but got []."),
        ("show", {"text": "", "words": "a"}, "`words` must be array, but got 'a'."),
        ("show", {"text": "", "table": {"a": [None]}}, "`table` must be object or null, but got {'a': [None]}."),
        ("show", {"text": "", "colour": "green"}, '`colour` must be one of ["red", "blue"]'),
        ("show", {"text": "", "anything": DEEP}, "`anything` must be any value, but got [[[[[["),
    ],
)
def test_a_call_with_wrong_arguments_is_invalid_and_says_what_was_expected(name, arguments, message):
    desk = Desk()
    call = one(DESK, desk, name, **arguments)
    assert call.status == "invalid"
    assert message in call.result
    assert call.result.startswith("Error: ")
    assert len(call.result) < 700
    assert desk.log == []


def test_what_the_parser_could_not_read_goes_back_to_the_policy():
    ((call,),) = run_calls(DESK, [(Desk(), [ParsedCall("", {}, "The call is no JSON.")])], **LIMITS)
    assert (call.status, call.result, call.name) == ("invalid", "Error: The call is no JSON.", "")


def test_results_of_any_type_are_a_short_clean_text():
    got = {name: one(HOSTILE, Hostile(), "give", name=name) for name in VALUES}
    cut = LIMITS["max_characters"] * "a"
    assert got["megabytes"].result == f"{cut}… (cut: 3,000,000 characters)"
    assert got["megabytes of bytes"].result == f"{cut}… (cut: more than 2,000 characters)"
    assert got["megabytes of json"].result[2000:] == "… (cut: more than 2,000 characters)"
    assert got["bytes"].result == "ok\ufffdé"
    assert got["surrogate"].result == "a\ufffdb"
    assert got["control"].result == "a[31mb\n\tc"
    assert got["nan"].result == '{"x": NaN}'
    assert got["loop"].result == "{'self': {...}}"
    assert got["none"].result == ""
    assert got["number"].result == "3"
    assert got["list"].result == '["ä", null, true]'
    assert got["tuples as keys"].result == "{(1, 2): 3}"
    failed = {name for name, call in got.items() if call.status != "done"}
    assert failed == {"deep", "huge integer", "unprintable", "unprintable inside"}
    assert got["deep"].result.startswith("Error: RecursionError: ")
    assert got["huge integer"].result.startswith("Error: ValueError: Exceeds the limit")
    assert got["unprintable"].result == got["unprintable inside"].result == "Error: OSError: no text"


@pytest.mark.parametrize("length", [9, 10, 11])
@pytest.mark.parametrize("letter", ["a", "é", "\U0001f600"])
def test_a_text_is_cut_only_if_it_is_too_long(length, letter):
    note = "" if length <= 10 else "… (cut: 11 characters)"
    for value in (letter * length, (letter * length).encode()):
        assert result_text(value, 10) == letter * min(length, 10) + note


@pytest.mark.parametrize("name", ["fail", "fail_later"])
def test_whatever_a_tool_raises_is_a_text_for_the_policy(name):
    expected = ["SystemExit: 2", "KeyboardInterrupt", "GeneratorExit", f"OSError: {1984 * 'x'}", "UnprintableError"]
    expected += ["StopIteration" if name == "fail" else "RuntimeError: coroutine raised StopIteration"]
    for number, text in enumerate(expected):
        call = one(HOSTILE, Hostile(), name, number=number)
        assert call.status == "failed"
        assert call.result.partition("…")[0] == f"Error: {text}"
    assert one(HOSTILE, Hostile(), "wait_later", seconds=0.01).status == "done", "the event loop lives"


def test_a_tool_gets_a_copy_of_its_arguments():
    given = {"values": [[1, 2]]}
    call = one(HOSTILE, Hostile(), "change", **given)
    assert (call.result, call.arguments, given) == ("changed", {"values": [[1, 2]]}, {"values": [[1, 2]]})


def test_rollouts_run_side_by_side_and_the_calls_of_one_in_their_order():
    waits = [0.4, 0.0, 0.3, 0.1, 0.2, 0.05, 0.35, 0.15]
    rollouts = [(Hostile(), [ParsedCall("wait", {"seconds": wait}), ParsedCall("fly")]) for wait in waits]
    rollouts.insert(3, (Hostile(), []))
    desk = Desk()
    rollouts.append((desk, [ParsedCall("add", {"number": n, "times": n}) for n in range(1, 9)]))
    began = time.monotonic()
    made = run_calls(HOSTILE, rollouts[:-1], **LIMITS)
    assert time.monotonic() - began < 1.2  # The slowest takes 0.4, all together 1.55.
    assert made.pop(3) == ()
    assert [calls[0].result for calls in made] == [f"waited {wait}" for wait in waits]
    assert [calls[1].status for calls in made] == ["invalid"] * 8
    assert all(calls[0].seconds >= wait for calls, wait in zip(made, waits, strict=True))
    (calls,) = run_calls(DESK, rollouts[-1:], **LIMITS)
    assert [call.result for call in calls] == [f"The sum is {n}." for n in (1, 5, 14, 30, 55, 91, 140, 204)]


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

    outcomes = side_by_side([[step] * 2] * 9, seconds=5.0, threads=3)
    assert most == 3
    assert [[outcome.value for outcome in row] for row in outcomes] == [[True, True]] * 9


def test_a_tool_that_hangs_takes_its_limit_once_and_its_rollout_alone():
    calls = {
        "hangs": [ParsedCall("wait", {"seconds": 30.0}), ParsedCall("give", {"name": "number"})],
        "spins": [ParsedCall("spin")],
        "hangs in the loop": [ParsedCall("give", {"name": "number"}), ParsedCall("wait_later", {"seconds": 30.0})],
        "well": [ParsedCall("wait", {"seconds": 0.6}), ParsedCall("wait_later", {"seconds": 0.6})],
    }
    worlds = {name: Hostile() for name in calls}
    began = time.monotonic()
    # Two threads: a thread that is abandoned does not keep others waiting.
    made = run_calls(HOSTILE, [(worlds[n], calls[n]) for n in calls], seconds=1.0, max_characters=100, threads=2)
    assert time.monotonic() - began < 2.2 + 0.7
    made = dict(zip(calls, made, strict=True))
    late = "Error: the tool did not return within 1 seconds."
    assert [(c.status, c.result) for c in made["hangs"]] == [
        ("timeout", late), ("failed", "Error: it was not run, since a call before it did not return."),
    ]  # fmt: skip
    assert [(c.status, c.result) for c in made["spins"]] == [("timeout", late)]
    assert [(c.status, c.result) for c in made["hangs in the loop"]] == [("done", "3"), ("timeout", late)]
    assert [c.result for c in made["well"]] == ["waited 0.6", "waited 0.6"]
    assert worlds["spins"].stopped.wait(5), "an endless loop is ended, else it would slow down the training"
    assert worlds["hangs in the loop"].stopped.wait(5), "a coroutine is cancelled"


def test_a_coroutine_that_blocks_the_event_loop_does_not_block_later_ones():
    blocked = [(Hostile(), [ParsedCall("block", {"seconds": 20.0})]) for _ in range(2)]
    made = run_calls(HOSTILE, blocked, seconds=0.2, max_characters=100)
    assert [call.status for (call,) in made] == ["timeout"] * 2
    assert one(HOSTILE, Hostile(), "wait_later", seconds=0.01).result == "waited 0.01"


PROGRAM = """
import asyncio, sys, time
from grail_lightning.environments.side_by_side import awaited, side_by_side

async def block():
    time.sleep(1e6)

jobs = [[lambda: time.sleep(1e6)], [lambda: awaited(asyncio.sleep(1e6))], [lambda: awaited(block())]]
print("begin", flush=True)
try:
    print([one.status for (one,) in side_by_side(jobs, seconds=float(sys.argv[1]), threads=3)])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_ends_while_its_tools_sleep_for_ever(interrupted):
    seconds = "1000" if interrupted else "0.3"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, seconds],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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


class Row:
    """An environment whose methods return what they are told."""

    def __init__(self, **returns):
        self.returns = returns

    def reset(self, question: str, hints: list, level: int = 0, *, seed: int):
        hints.append(1)
        self.given = (question, hints, level, seed)
        return self.returns.get("reset")

    def _give(self, name):
        value = self.returns[name]
        if isinstance(value, BaseException):
            raise value
        return value

    def get_reward(self):
        return self._give("reward")

    async def score_turn(self):
        return self._give("score")

    def state_key(self):
        return self._give("state")


def test_reset_gets_columns_and_a_seed_if_it_names_one():
    row, columns = Row(reset="Go."), {"question": "q", "hints": [], "level": 2}
    assert call_reset(row, columns, seed=7) == "Go."
    assert row.given == ("q", [1], 2, 7)
    assert columns["hints"] == [], "the rollouts of a group share a row"
    assert call_reset(row, columns | {"seed": 5}, seed=7) == "Go."
    assert row.given[3] == 5
    desk = Desk()
    assert call_reset(desk, {"number": 4, "other": 1}, seed=7) == "Number 4."
    assert call_reset(Row(), columns, seed=7) is None
    with pytest.raises(ValueError, match=r"`Row.reset` must return text or None, but got \[1\] of type `list`"):
        call_reset(Row(reset=[1]), columns, seed=7)
    with pytest.raises(ValueError, match=r"`Row.reset` must not fail, but raised AttributeError: 'str' object has no"):
        call_reset(Row(), columns | {"hints": "a"}, seed=7)


def test_columns_are_checked_before_a_run():
    check_columns(Row, ["question", "hints"])
    check_columns(Desk, ["anything"])
    with pytest.raises(ValueError, match=r"`Row.reset` requires the column `question`, but a row has only `hints`"):
        check_columns(Row, ["hints"])
    with pytest.raises(ValueError, match=r"takes `hints`, .* but a row also has `answer`. Remove the column, or let"):
        check_columns(Row, ["question", "hints", "answer"])


def test_rewards_scores_and_states_are_checked():
    assert call_reward(Desk()) == 0.0
    assert call_reward(Hostile()) is call_score(Desk()) is call_state(Desk()) is None
    row = Row(reward=True, score=0.5, state=("a", 1))
    assert (call_reward(row), call_score(row), call_state(row)) == (1.0, 0.5, ("a", 1))
    assert call_reward(Row(reward=None)) is None
    for wrong in (float("nan"), float("inf"), "1", b"1", 10**400, [1.0], object()):
        with pytest.raises(ValueError, match=r"`Row.get_reward` must return a finite number or None, but got"):
            call_reward(Row(reward=wrong))
        with pytest.raises(ValueError, match=r"`Row.score_turn` must return a finite number or None, but got"):
            call_score(Row(score=wrong))
    with pytest.raises(
        ValueError, match=r"`Row.state_key` must return a hashable key, .* but got \[1\] of type `list`"
    ):
        call_state(Row(state=[1]))
    with pytest.raises(ValueError, match=r"`Row.get_reward` must not fail, but raised OSError: gone"):
        call_reward(Row(reward=OSError("gone")))
