"""The environment whose tool runs programs, in the sandbox of this machine and in a run of the command line."""

import re
import time

import pytest

from grail_lightning import EpisodeLimits
from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.tools import ToolSet, run_calls
from grail_lightning.worlds.code.python import Python
from grail_lightning.worlds.programs.outcome import ProgramLimits
from grail_lightning.worlds.words.task import WordProblemSpace

pytestmark = pytest.mark.usefixtures("programs_run")
TRACEBACK = "Traceback (most recent call last):\n"


@pytest.fixture(scope="module")
def python():
    return Python(limits=ProgramLimits(seconds=0.5, memory_mb=128))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("for x in range(3):\n    print(x)", "0\n1\n2"),
        ("import sys\nprint(__name__, file=sys.stderr)\nsys.exit(2)", "__main__"),
        ("x = 1", ""),
        (
            "print('so far')\ndef f():\n    return 1 / 0\nf()",
            f'so far\n{TRACEBACK}  File "<code>", line 4, in <module>\n  File "<code>", line 3, in f\n'
            "ZeroDivisionError: division by zero",
        ),
        ("print(", "  File \"<code>\", line 1\n    print(\n         ^\nSyntaxError: '(' was never closed"),
        ("input()", f'{TRACEBACK}  File "<code>", line 1, in <module>\nEOFError: EOF when reading a line'),
        ("[0] * 10**9", f'{TRACEBACK}  File "<code>", line 1, in <module>\nMemoryError'),
    ],
)
def test_a_program_is_answered_by_what_it_prints_and_its_traceback(python, code, told):
    assert python.run(code) == told


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True: pass", "Error: timeout: "),
        ("import os; os._exit(0)", "Error: crashed: "),
        ("while True: print('yes')", "yes\nyes\n"),
        ("raise Exception('y' * 10**7)", "y"),
        ("import traceback; traceback.format_exception = None; 1 / 0", "Error: crashed: "),
        ("open('note', 'w')", TRACEBACK),
    ],
)
def test_a_hostile_program_is_a_short_answer_and_the_next_one_runs(python, code, told):
    answer = python.run(code)
    assert answer.startswith(told)
    assert len(answer) <= 8000
    assert python.run("print('next')") == "next"


def test_no_program_sees_what_one_before_has_left(python):
    python.run("import builtins, math\nbuiltins.left = math.left = 1")
    assert python.run("import math\nprint(hasattr(math, 'left'))\nleft").startswith("False\nTraceback")


def called(python, codes, seconds):
    """The calls of one rollout for each program."""
    calls = [(ToolSet(Python), python, [ParsedCall("run", {"code": code})]) for code in codes]
    return [call for (call,) in run_calls(calls, [EpisodeLimits(tool_seconds=seconds)] * len(calls))]


def test_programs_that_take_long_do_not_use_up_the_seconds_of_others():
    codes = [f"import time; time.sleep({seconds})" for seconds in (0.58, 0.59, 0.6)] + ["print('mine')"]
    python = Python(limits=ProgramLimits(seconds=0.5), workers=1)
    assert python.run("") == "", "a sandbox is there"
    made = called(python, codes, seconds=1.6)
    assert [call.status for call in made] == ["done"] * 4
    assert made[-1].result == "mine"


def test_programs_that_nobody_waits_for_hold_up_no_others():
    def gives_up():
        raise KeyboardInterrupt

    python = Python(limits=ProgramLimits(seconds=0.5), workers=1)
    (lost,) = called(python, ["import time; time.sleep(1.5)"], seconds=0.3)
    assert lost.status == "timeout"
    begun = time.monotonic()
    for k in range(5):
        with pytest.raises(KeyboardInterrupt):
            python._executor.printed(f"import time; time.sleep({1.2 + k / 10})", gives_up)
    assert python.run("print('next')") == "next"
    assert time.monotonic() - begun < 5, "together they sleep for seven seconds"


def test_the_worked_examples_of_word_problems_are_programs_with_their_results(python):
    for row in WordProblemSpace(min_steps=2, max_steps=2, largest=999, calls="python").sample(3, "train"):
        pairs = re.findall("<run>(.*)</run>\n<result>(.*)</result>\n", row["solution"])
        assert len(pairs) == 2
        assert [python.run(code) for code, _ in pairs] == [result for _, result in pairs]
        assert row["solution"].endswith(f"{pairs[-1][1]}</result>\n#### {row['answer']}")
