"""Tools of environments: their schemas and checks, and calls that are hostile in every way.

The peer is TRL: its trainer is built on one of these classes, and its own loop calls the tools.
"""

import asyncio
import inspect
import threading
import time
from enum import Enum
from typing import Any, Literal

import pytest
from PIL import Image

from grail_lightning import EpisodeLimits
from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.tools import ToolSet, _result, run_calls


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
TEXT = {"type": "text", "text": "be"}
GIVEN = {  # What a tool returns, and what the policy is told.
    "megabytes": ("a" * 3_000_000, CUT),
    "megabytes of bytes": (b"a" * 3_000_000, f"b'{1998 * 'a'}… (cut: 3,000,003 characters)"),
    "a character too many": ("é" * 2001, 2000 * "é" + "… (cut: 2,001 characters)"),
    "as many as may be": ("é" * 2000, 2000 * "é"),
    "bytes": (b"ok\xff", r"b'ok\xff'"),
    "surrogate": ("a\ud800b", "a?b"),
    "control": ("a\x00\x1b[31mb\r\n\tc\x7f\x9b", "a[31mb\n\tc"),
    "nan": ({"x": float("nan")}, "{'x': nan}"),
    "loop": (LOOP, "{'self': {...}}"),
    "none": (None, "None"),
    "false": (False, "False"),
    "list": (["ä", None, 3], "['ä', None, 3]"),
    "an empty list": ([], "[]"),
    "parts": ([{"type": "text", "text": "to "}, TEXT], "to be"),
    "parts and others": (("to ", TEXT, None), "to beNone"),
    "a part alone": (TEXT, "{'type': 'text', 'text': 'be'}"),
    "no part": ([{"type": "text", "text": 3}], "[{'type': 'text', 'text': 3}]"),
    "a part of megabytes": ([TEXT, {"type": "text", "text": "a" * 3_000_000}], f"be{CUT.replace('aa', '', 1)}"),
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


JSON = {  # What the policy is told where results are JSON, if it is something else.
    "megabytes of bytes": CUT,
    "bytes": "ok\ufffd",
    "nan": '{"x": NaN}',
    "none": "",
    "false": "false",
    "list": '["ä", null, 3]',
    "parts and others": "to be",
    "a part alone": '{"type": "text", "text": "be"}',
    "no part": '[{"type": "text", "text": 3}]',
}


def one(tools, environment, name, /, **arguments):
    """The result of one call."""
    ((call,),) = run([(tools, environment, [ParsedCall(name, arguments)])])
    return call


def bare(self, number): ...


def undocumented(self, number: int):
    """A tool."""


def yielding(self):
    """A tool."""
    yield 1


def many(self, *numbers: int):
    """A tool."""


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"add": Desk.add}, "must have a method `reset`, but `World` has none. Write `def reset"),
        ({"reset": Desk.reset, "get_reward": bare}, "has no public method but `get_reward`, `reset`. Write one with"),
        ({"reset": Desk.reset, "tool": bare}, "`World.tool` cannot be described to the policy: .* has no docstring"),
        ({"reset": Desk.reset, "tool": undocumented}, "`World.tool` .* no description for the argument 'number'"),
        (
            {"reset": Desk.reset, "tool": yielding},
            "`World.tool` cannot be described .* a result is returned as a whole",
        ),
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


@pytest.mark.parametrize("name", GIVEN)
def test_results_of_any_type_are_a_short_clean_text(name):
    call, expected = one(HOSTILE, Hostile(), "do", what="give", which=name), GIVEN[name][1]
    failed = expected.startswith("Error: ")
    assert call.status == ("failed" if failed else "done")
    assert call.result.startswith(expected) if failed else call.result == expected
    ((short,),) = run([(HOSTILE, Hostile(), [ParsedCall("do", call.arguments)])], result_characters=10)
    assert len(short.result) < 40


@pytest.mark.parametrize("name", GIVEN)
def test_results_are_json_where_that_is_asked_for(name):
    call, expected = one(ToolSet(Hostile, results="json"), Hostile(), "do", what="give", which=name), GIVEN[name][1]
    if expected.startswith("Error: "):
        assert call.result.startswith(expected)
    else:
        assert call.result == JSON.get(name, expected)


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


def test_two_texts_of_a_result_cannot_together_be_the_place_of_a_picture():
    picture = Image.new("RGB", (8, 8))
    text, pictures = _result(["<ima", "ge> hidden ", picture, " behind"], 100)
    assert text == "< image> hidden <image> behind"
    assert len(pictures) == 1
