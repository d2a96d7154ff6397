"""Tools of environments: their schemas and checks, calls that are hostile in every way, many rollouts side by side.

The peer is TRL: its trainer is built on one of these classes, and its own loop calls the tools.
"""

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from grail_lightning.environments.calls import ParsedCall
from grail_lightning.environments.episode import EpisodeLimits
from grail_lightning.environments.side_by_side import side_by_side
from grail_lightning.environments.tools import (
    ToolSet,
    call_number,
    call_reset,
    call_state,
    check_columns,
    result_text,
    run_calls,
)


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
CUT = f"{2000 * 'a'}… (cut: 3,000,000 characters)"
GIVEN = {  # What a tool returns, and what the policy is told.
    "megabytes": ("a" * 3_000_000, CUT),
    "megabytes of bytes": (b"a" * 3_000_000, CUT),
    "a character too many": ("é" * 2001, 2000 * "é" + "… (cut: 2,001 characters)"),
    "as many as may be": ("é" * 2000, 2000 * "é"),
    "bytes": (b"ok\xff\x00\xc3\xa9", "ok\ufffdé"),
    "surrogate": ("a\ud800b", "a?b"),
    "control": ("a\x00\x1b[31mb\r\n\tc\x7f\x9b", "a[31mb\n\tc"),
    "nan": ({"x": float("nan")}, '{"x": NaN}'),
    "loop": (LOOP, "{'self': {...}}"),
    "none": (None, ""),
    "false": (False, "false"),
    "list": (["ä", None, 3], '["ä", null, 3]'),
    "tuples as keys": ({(1, 2): 3}, "{(1, 2): 3}"),
    "deep": (DEEP, "Error: RecursionError: "),
    "huge integer": (10**5000, "Error: ValueError: Exceeds the limit"),
    "unprintable": (Unprintable(), "Error: OSError: no text"),
    "unprintable inside": ([Unprintable()], "Error: OSError: no text"),
}
ERRORS = [SystemExit(2), KeyboardInterrupt(), GeneratorExit(), OSError("x" * 5000), UnprintableError(), StopIteration()]


class Hostile:
    """Tools that do what tools must not."""

    def __init__(self):
        self.stopped = threading.Event()

    def reset(self): ...

    def do(self, what: str, which: Any = None):
        """Return, raise, wait or compute for ever.

        Args:
            what: What is done.
            which: The value, the exception, or seconds.
        """
        if what == "give":
            return GIVEN[which][0]
        if what == "fail":
            raise ERRORS[which]
        try:
            while what == "spin":
                pass
        finally:
            self.stopped.set()
        time.sleep(which)
        return f"waited {which}"

    async def do_later(self, what: str, which: Any):
        """Do it in the event loop.

        Args:
            what: What is done.
            which: The value, the exception, or seconds.
        """
        if what != "wait":
            return self.do("wait" if what == "block" else what, which)
        try:
            await asyncio.sleep(which)
        finally:
            self.stopped.set()
        return f"waited {which}"

    def change(self, values: list):
        """Change the arguments.

        Args:
            values: What is emptied.
        """
        values[0].clear()
        values.clear()
        return "changed"


DESK, HOSTILE = ToolSet(Desk), ToolSet(Hostile)


def run(rollouts, **limits):
    """The calls of rollouts: (tools, environment, calls)."""
    return run_calls(rollouts, [EpisodeLimits(**{"tool_seconds": 5.0, **limits})] * len(rollouts))


def one(tools, environment, name, /, **arguments):
    """The result of one call."""
    ((call,),) = run([(tools, environment, [ParsedCall(name, arguments)])])
    return call


def bare(self, number): ...


def undocumented(self, number: int):
    """A tool."""


def many(self, *numbers: int):
    """A tool."""


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"add": Desk.add}, "must have a method `reset`, but `World` has none. Write `def reset"),
        ({"reset": Desk.reset, "get_reward": bare}, "has no public method but `get_reward`, `reset`. Write one with"),
        ({"reset": Desk.reset, "tool": bare}, "`World.tool` cannot be described to the policy: .* has no docstring"),
        ({"reset": Desk.reset, "tool": undocumented}, "`World.tool` .* no description for the argument 'number'"),
        ({"reset": Desk.reset, "tool": many}, "`World.tool` .* cannot be given by its name. Write them, or"),
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
            ("text", "3"), ("share", 3), ("loud", True), ("mood", "bad"), ("unit", 1), ("at", None), ("at", 10**30),
            ("either", 2), ("either", "2"), ("table", None), ("colour", "blue"), ("anything", {"a": [1.5, "2", None]}),
        ]),
        ("text", 3, "3"), ("text", 2.5, "2.5"), ("share", " 1e3 ", 1000.0), ("loud", "true", True),
        ("loud", "False", False), ("unit", "1", 1), ("at", "-7", -7), ("at", 3.0, 3), ("at", "3.0", 3),
        ("at", "null", None), ("words", [1, "b"], [1, "b"]), ("words", '["b"]', ["b"]),
        ("table", '{"a": ["1", 2.0]}', {"a": ["1", 2.0]}),
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
        ("show", {"text": "", "table": [None]}, "`table` must be object or null, but got [None]."),
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
    ((call,),) = run([(DESK, Desk(), [ParsedCall("", {}, "The call is no JSON.")])])
    assert (call.status, call.result, call.name) == ("invalid", "Error: The call is no JSON.", "")


@pytest.mark.parametrize("name", GIVEN)
def test_results_of_any_type_are_a_short_clean_text(name):
    call, expected = one(HOSTILE, Hostile(), "do", what="give", which=name), GIVEN[name][1]
    failed = expected.startswith("Error: ")
    assert call.status == ("failed" if failed else "done")
    assert call.result.startswith(expected) if failed else call.result == expected
    assert len(result_text(call.result, 10)) < 40


@pytest.mark.parametrize("name", ["do", "do_later"])
def test_whatever_a_tool_raises_is_a_text_for_the_policy(name):
    expected = ["SystemExit: 2", "KeyboardInterrupt", "GeneratorExit", f"OSError: {1984 * 'x'}", "UnprintableError"]
    expected += ["StopIteration" if name == "do" else "RuntimeError: coroutine raised StopIteration"]
    for number, text in enumerate(expected):
        call = one(HOSTILE, Hostile(), name, what="fail", which=number)
        assert call.status == "failed"
        assert call.result.partition("…")[0] == f"Error: {text}"
    assert one(HOSTILE, Hostile(), "do_later", what="wait", which=0.01).status == "done", "the event loop lives"


def test_a_tool_gets_a_copy_of_its_arguments():
    given = {"values": [[1, 2]]}
    call = one(HOSTILE, Hostile(), "change", **given)
    assert (call.result, call.arguments, given) == ("changed", {"values": [[1, 2]]}, {"values": [[1, 2]]})


def test_rollouts_run_side_by_side_and_the_calls_of_one_in_their_order():
    waits = [0.4, 0.0, 0.3, 0.1, 0.2, 0.05, 0.35, 0.15]
    rollouts = [
        (HOSTILE, Hostile(), [ParsedCall("do", {"what": "wait", "which": wait}), ParsedCall("fly")]) for wait in waits
    ]
    rollouts.insert(3, (HOSTILE, Hostile(), []))
    rollouts.append((DESK, Desk(), [ParsedCall("add", {"number": n, "times": n}) for n in range(1, 9)]))
    began = time.monotonic()
    made = run(rollouts)
    assert time.monotonic() - began < 1.2  # The slowest takes 0.4, all together 1.55.
    assert [call.result for call in made.pop()] == [f"The sum is {n}." for n in (1, 5, 14, 30, 55, 91, 140, 204)]
    assert made.pop(3) == ()
    assert [calls[0].result for calls in made] == [f"waited {wait}" for wait in waits]
    assert [calls[1].status for calls in made] == ["invalid"] * 8
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


def test_a_tool_that_hangs_takes_its_limit_once_and_its_rollout_alone():
    waits = [ParsedCall(name, {"what": "wait", "which": 0.6}) for name in ("do", "do_later")]
    calls = {
        "hangs": [ParsedCall("do", {"what": "wait", "which": 30.0}), *waits],
        "spins": [ParsedCall("do", {"what": "spin"})],
        "hangs in the loop": [waits[0], ParsedCall("do_later", {"what": "wait", "which": 30.0})],
        "blocks the loop": [ParsedCall("do_later", {"what": "block", "which": 20.0})],
        "well": waits,
    }
    worlds = {name: Hostile() for name in calls}
    began = time.monotonic()
    made = run([(HOSTILE, worlds[name], calls[name]) for name in calls], tool_seconds=1.0)
    assert time.monotonic() - began < 4.5
    made = {name: [(c.status, c.result) for c in own] for name, own in zip(calls, made, strict=True)}
    late = "timeout", "Error: the tool did not return within 1 seconds."
    lost = "failed", "Error: it was not run, since a call before it did not return."
    assert made["hangs"] == [late, lost, lost]
    assert made["spins"] == made["blocks the loop"] == [late]
    assert made["hangs in the loop"] == [("done", "waited 0.6"), late]
    assert made["well"] == [("done", "waited 0.6")] * 2
    assert worlds["spins"].stopped.wait(5), "an endless loop is ended, else it would slow down the training"
    assert worlds["hangs in the loop"].stopped.wait(5), "a coroutine is cancelled"


PROGRAM = """
import asyncio, sys, time
from grail_lightning.environments.side_by_side import awaited, side_by_side

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
    assert call_reset(Desk(), {"number": 4, "other": 1}, seed=7) == "Number 4."
    assert call_reset(Row(), columns, seed=7) is None


def test_rewards_scores_and_states():
    assert call_number(Desk(), "get_reward") == 0.0
    assert call_number(Hostile(), "get_reward") is call_number(Desk(), "score_turn") is call_state(Desk()) is None
    row = Row(reward=True, score=0.5, state=("a", 1))
    assert (call_number(row, "get_reward"), call_number(row, "score_turn")) == (1.0, 0.5)
    assert call_state(row) == ("a", 1)
    assert call_number(Row(reward=None), "get_reward") is None


ROW = {"question": "q", "hints": []}
WRONG = float("nan"), float("inf"), "1", b"1", 10**400, [1.0], object()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: check_columns(Row, ["hints"]),
            r"`Row.reset` must take the columns `hints` .*: missing a .*'question'",
        ),
        (
            lambda: check_columns(Row, [*ROW, "answer"]),
            "columns `answer`, `hints`, .*'answer'. Add or remove the column",
        ),
        (
            lambda: call_reset(Row(reset=[1]), ROW, seed=7),
            r"reset` must return text or None, but got \[1\] of type `list",
        ),
        (
            lambda: call_reset(Row(), ROW | {"hints": "a"}, seed=7),
            "reset` must not fail, but raised AttributeError: 'str'",
        ),
        (lambda: call_state(Row(state=[1])), r"must return a hashable key, such as a tuple, but got \[1\] of"),
        *[
            (lambda e=e: call_number(Row(reward=e("gone")), "get_reward"), f"must not fail, .* {e.__name__}: gone")
            for e in (OSError, SystemExit)
        ],
        *[(lambda w=w: call_number(Row(reward=w), "get_reward"), "must return a finite number or None") for w in WRONG],
        *[(lambda w=w: call_number(Row(score=w), "score_turn"), "must return a finite number or None") for w in WRONG],
    ],
)
def test_what_an_environment_must_not_do_is_told_in_one_line(ask, message):
    check_columns(Row, ROW)
    check_columns(Desk, ["anything"])
    with pytest.raises(ValueError, match=message):
        ask()
