"""What becomes of programs, and of the processes that run them."""

import ast
import contextlib
import inspect
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.grade import line_of
from grail_lightning.worlds.programs.guest import decode, encode
from grail_lightning.worlds.programs.isolation import Bubblewrap, Sandlock
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, TestCall, Tests, Visit
from grail_lightning.worlds.programs.probe import probe, refusal

ADDS_ONE = "def f(x): return x + 1"
TESTS = Tests(entry="f", calls=tuple(TestCall((n,), n + 1) for n in range(4)))
ASSERTIONS = Tests(entry="f", assertions=tuple(f"assert f({n}) == {n + 1}" for n in range(4)))


def passes(outcome):
    return "".join(str(int(passed)) for passed in outcome.passed)


@pytest.mark.parametrize(
    ("program", "status", "passed", "line", "message"),
    [
        (ADDS_ONE, "passed", "1111", None, ""),
        ("def f(x):\n    return x + 1 if x < 2 else x", "failed", "1100", None, ""),
        ("def f(x):\n    y = 1\n    return x + y + 0 // x", "raised", "0111", 3, "ZeroDivisionError: "),
        ("def f(x):\n  return x +", "syntax", "0000", 2, "invalid syntax"),
        ("x = 1\nraise KeyError('a')", "raised", "0000", 2, "KeyError: 'a'"),
        ("def g(x): return x + 1", "raised", "0000", None, "NameError: the program defines no `f`"),
        ("def f(x):\n    while x == 2: pass\n    return x + 1", "timeout", "1100", None, ""),
        ("def f(x): return x + 1 if x < 3 else 'x' * 10**9", "memory", "1110", 1, ""),
        ("def f(x):\n    print('x' * 10**5)\n    return x + 1", "output", "0000", None, "printed more than it may"),
        ("import os\ndef f(x): return x + 1 if x < 1 else os._exit(3)", "crashed", "1000", None, ""),
        ("def f(x): return x + 1 if x else object", "failed", "0111", None, ""),
        ("#" * 10**6, "refused", "0000", None, "a program of 1000000 characters"),
    ],
)
def test_status_tests_and_line_by_calls_and_by_assertions(executor, program, status, passed, line, message):
    for outcome in executor.run_many([Job(program, TESTS), Job(program, ASSERTIONS)]):
        assert (outcome.status, outcome.line) == (status, line), outcome
        assert passes(outcome) == passed
        assert outcome.failing == (passed.index("0") if "0" in passed else None)
        assert outcome.share == passed.count("1") / 4
        assert outcome.message.startswith(message)


SEARCH = """
import gc, sys
def f(backwards, *rest):
    held, frame = gc.get_objects(), sys._getframe()
    while frame:
        held += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    texts = (repr(value) for value in held if type(value) in (dict, list, tuple))
    return any(backwards[::-1] in text for text in texts)
"""


def test_what_is_expected_is_not_in_the_program_s_process(executor):
    calls = (TestCall(("terces",), False), TestCall(("nwohs", "shown"), True), TestCall(("x",), "secret"))
    assertions = ("assert f('terces') is False", "assert f('nwohs', 'shown')", "assert f('x') == 'secret'")
    for tests in (Tests("f", calls), Tests("f", (), assertions)):
        assert executor.run(SEARCH, tests).passed == (True, True, False)


PREAMBLE = """
import math
def near(a, b): return all(math.isclose(x, y) for x, y in zip(a, b))
def after(x, *more):
    f(x, *more)
    return x
def kept(x):
    before = x.copy()
    try: f(x)
    except ValueError: pass
    return x == before
def raises(x):
    try: f(x)
    except ValueError: return 1
    return 0
"""
SORTS = "def f(x, reverse=False):\n    if not x: raise ValueError('empty')\n    return sorted(x, reverse=reverse)"
APPENDS = "def f(x, *more):\n    for value in more: x[1].append(value)\n    return None if more else x.sort()"
INSIDE = "def f(x): (x[0] if type(x) is tuple else x['a'][0] if type(x) is dict else x).sort()"
NEGATIVE = "def f(x):\n    if x {} 0: raise ValueError('negative')\n    return x"
LONG = "assert f(list(range(20000))) == sum(range(20000))"
ENDS = ["assert list(map(f, [1])) == []", "assert all(map(f, [1]))"]


@pytest.mark.parametrize(
    ("program", "assertions", "passed", "status", "message"),
    [
        (
            SORTS,
            [
                "assert near(f([2.0, 1.0]), [1.0, 2.0])",
                "assert candidate([1, 3], reverse=True) == [3, 1] and f((2, 1)) == [1, 2]",
                "try:\n    f([])\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'empty'",
                "assert f([1]) == [2], 'wrong'",
            ],
            *("1110", "failed", "AssertionError: wrong"),
        ),
        # Assertions see what a program does to its arguments.
        (
            APPENDS,
            [
                "assert after([2, 1]) == [1, 2]",
                "assert kept([1, 2])",
                "assert kept([2, 1])",
                "assert after({1: []}, 5) == {1: [5]}",
            ],
            *("1101", "failed", "AssertionError"),
        ),
        (
            INSIDE,
            [f"x = [2, 1]\nf({given})\nassert x == [2, 1]" for given in ("x=x", "(x,)", "{'a': [x]}")],
            *("000", "failed", ""),
        ),
        ("def f(x):\n    x.clear()\n    x.add(3)", ["assert after({1, 2}) == {3}"], "1", "passed", ""),
        ("def f(x): x[0] = (3, 4)", ["assert after([(1, 2)]) == [(3, 4)]"], "1", "passed", ""),
        ("def f(x):\n    x.clear()\n    raise ValueError", ["assert kept([1, 2])"], "0", "failed", ""),
        ("def f(x): x.append(f)", ["assert kept([1, 2])"], "0", "failed", "the entry left what is no literal"),
        # Arguments may be longer than what a program may print.
        ("def f(x): return x.reverse() or sum(x)", [LONG], "1", "passed", ""),
        ("def f(x): return x * 9", [LONG], "0", "output", "a reply of more than "),
        # An error that an assertion expects is not the reason why it fails.
        (NEGATIVE.format("<"), ["assert f(2) + raises(-1) == 5"], "0", "failed", "AssertionError"),
        (NEGATIVE.format(">"), ["assert f(2) + raises(-1) == 5"], "0", "raised", "ValueError: negative"),
        # An error that takes other arguments than a text.
        ("def f(x): b'\\xff'.decode()", ["assert raises(1)"], "1", "passed", ""),
        # No exception of a program ends the iteration of an assertion.
        ("def f(x): raise StopIteration", ENDS, "00", "raised", ""),
        ("def f(x): raise StopAsyncIteration", ENDS, "00", "raised", ""),
        ("def f(x): raise GeneratorExit", ENDS, "00", "raised", ""),
        ("def f(x): raise type('StopIteration', (BaseException,), {})", ENDS, "00", "raised", ""),
    ],
)
def test_assertions(executor, program, assertions, passed, status, message):
    outcome = executor.run(program, Tests("f", (), tuple(assertions), PREAMBLE))
    assert (passes(outcome), outcome.status) == (passed, status), outcome
    assert outcome.message.startswith(message)


def test_programs_see_neither_the_configuration_nor_the_guest(executor):
    assert executor.run("import sys\ndef f(x): return x + len(sys.argv)", TESTS).status == "passed"
    script = "import pickle\nclass A: pass\nfrom __main__ import A\nprint(type(pickle.loads(pickle.dumps(A()))))"
    assert executor.printed(script) == "<class '__main__.A'>\n"
    assert executor.printed("import sys\nprint(len(sys.argv))\nsys.exit('the end')") == "1\nthe end\n"


def test_tests_that_hold_no_literals_are_an_error(executor):
    with pytest.raises(TypeError, match="object is no literal"):
        executor.run(ADDS_ONE, Tests(entry="f", calls=(TestCall((object(),), 1),)))


TRACED = """\
def f(n):
    total = 0
    for i in range(n):
        total += (
            i
        )
    return {"sum": total}
"""


def traced(executor, program, argument):
    return executor.run(program, Tests("f", (TestCall((argument,), None),)), trace=0)


def test_a_trace_by_hand(executor):
    trace = traced(executor, TRACED, 2).trace
    i, n, total = (lambda *v: tuple(zip(("i", "n", "total"), map(str, v), strict=True))), ("n", "2"), "total"
    assert trace == (
        Visit(2, "line", (n,), None, 1),
        Visit(3, "line", (n, (total, "0")), None, 1),
        Visit(4, "line", i(0, 2, 0), None, 1),
        Visit(3, "line", i(0, 2, 0), None, 1),
        Visit(4, "line", i(1, 2, 0), None, 1),
        Visit(3, "line", i(1, 2, 1), None, 1),
        Visit(7, "line", i(1, 2, 1), None, 1),
        Visit(7, "return", i(1, 2, 1), "dict[('sum', 1)]", 1),
    )


def test_a_trace_of_exceptions_and_objects(executor):
    program = (
        "def f(x):\n    try:\n        return g(x)\n    except KeyError:\n        return {3, 1}, object()\n"
        "def g(x): raise KeyError(x)"
    )
    trace = traced(executor, program, 1).trace
    assert [(visit.line, visit.event, visit.value, visit.depth) for visit in trace] == [
        (2, "line", None, 1),
        (3, "line", None, 1),
        (6, "line", None, 2),
        (6, "raise", "KeyError", 2),
        (3, "raise", "KeyError", 1),
        (2, "line", None, 1),  # `except` is a part of `try`
        (5, "line", None, 1),
        (5, "return", "(set[1, 3], <object>)", 1),
    ]


GROWS = "def f(n):\n    for i in range(n):\n        x = 'x' * i"
CATCHES = "def f(n):\n    try:\n        for i in range(n): i += 1\n    except:\n        return None"


@pytest.mark.parametrize(
    ("program", "argument", "status", "fewest", "most", "cut"),
    [
        ("def f(n): n and f(n - 1)", 300, "passed", 602, 602, False),
        ("def f(n):\n    while True:\n        n += 1", 1, "timeout", 1000, 1000, True),
        (GROWS, 9999, "timeout", 100, 1000, True),  # Its characters are too many.
        (CATCHES, 9999, "passed", 1, 1000, True),  # The end of the trace.
        ("def f(x):\n    for c in x: c", "😀" * 400, "timeout", 1, 1000, True),  # Six bytes each.
    ],
)
def test_a_trace_has_an_end(executor, program, argument, status, fewest, most, cut):
    outcome = traced(executor, program, argument)
    assert (outcome.status, outcome.cut) == (status, cut)
    assert fewest <= len(outcome.trace) <= most


def test_a_trace_of_two_calls_is_cut_inside_of_the_second(executor):
    program = "def g(x): return x\ndef f(n):\n    for k in range(n):\n        g(k)\n    return n"
    calls = executor.run(program, Tests("f", (), ("assert f(1) + f(400)",)), trace=0)
    assert (calls.status, calls.cut) == ("timeout", True)


# Classes with the names of Python's own, members that have no order or one of the program's, and numbers of two kinds.
SHOWN = """
class deque:
    compared = 0
    def __lt__(self, other): deque.compared += 1
def f(x):
    held = {deque(), deque()}, {2: x, "a": 1}, 2.0 ** 60, {2.5, True}, 10**6000
    return deque.compared, held
"""


def test_a_trace_shows_values_and_runs_no_method_of_the_program(executor):
    last = traced(executor, SHOWN, 3).trace[-1]
    shown = "(set[<deque>, <deque>], dict[('a', 1), (2, 3)], 1152921504606846976, set[1, 2.5], "
    shown += hex(10**6000)[:200] + ")"  # Python would not show it.
    assert last.variables == (("held", shown), ("x", "3"))
    assert last.value == f"(0, {shown})"


# Answers in the guest's place.
ANSWER = """
import os, sys
def answer(data):
    try:
        import _host
        return _host.call(data)
    except ImportError: pass
    data += b"\\n"
    while data: data = data[os.write(3, data):]
"""
FORGES = """
def f(x):
    if sys.gettrace() is None: return 0
    sys.settrace(None)
    answer({})
    os._exit(0)
"""


def test_a_forged_trace_costs_the_grader_little(executor):
    """Numbers with one hash, of which a set takes time that grows with their square; and a million bytes of no text."""
    colliding = """b'{"ok":{"s":[' + b",".join(b"%d" % (k * (2**61 - 1)) for k in range(20000)) + b']}}'"""
    empty = """b'{"ok":0,"trace":[[2,"line",[' + b",".join([b'["",""]'] * 125000) + b'],null,1]]}'"""
    begun = time.process_time()
    first, second = executor.run_many([Job(ANSWER + FORGES.format(data), TESTS, 0) for data in (colliding, empty)])
    assert time.process_time() - begun < 5
    assert (first.status, second.trace, second.cut) == ("output", (), True)


def test_outcomes_are_kept_in_order_and_reproducible(executor, monkeypatch):
    """The newest stay, and no traces."""
    drawn = "hash(str(x)), random.random(), list({str(n) for n in range(50)}), os.getpid() > 0"
    noisy = f"import os, random\ndef f(x): return {drawn}"
    texts = {executor.run(f"{noisy}  # {n}", Tests("f", (TestCall((1,), None),))).message for n in range(3)}
    assert len(texts) == 1, "hashes and `random` have the same seed in each run"
    monkeypatch.setattr("grail_lightning.worlds.programs.executor._MOST_KEPT", 5)
    jobs = [Job(f"def f(x): return x + {n % 9}", TESTS) for n in range(18)]
    outcomes = executor.run_many(jobs)
    assert [outcome.status for outcome in outcomes] == (["failed", "passed"] + ["failed"] * 7) * 2
    assert [*map(id, outcomes[:9])] == [*map(id, outcomes[9:])]
    assert traced(executor, TRACED, 2).trace
    assert [*map(id, executor._kept.values())] == [*map(id, outcomes[4:9])]


def test_sandboxes_that_are_killed_lose_no_verdict(executor):
    def kill():
        for _ in range(4):  # fewer than it tries a program
            time.sleep(0.2)
            living = [sandbox._process for sandbox in executor._sandboxes if sandbox._process]
            os.killpg(random.Random(0).choice(living).pid, signal.SIGKILL)

    jobs = [Job(f"def f(x): return x + {n % 2} + 0 * sum(range(200000))  # killed {n}", TESTS) for n in range(40)]
    thread = threading.Thread(target=kill)
    thread.start()
    outcomes = executor.run_many(jobs)
    thread.join()
    assert [outcome.status for outcome in outcomes] == ["failed", "passed"] * 20
    assert executor.run(ADDS_ONE + "  # after", TESTS).status == "passed"


def test_what_a_program_leaves_behind_does_not_reach_the_next(executor):
    alone = Executor(executor.isolation, executor.limits, workers=1)
    for spoils in (
        """answer(b'{"ok": 4}'); os._exit(0)""",
        """answer(b'{"ok": 4}'); os.read(3, 3); os._exit(0)""",
        """[answer(b'{"ok": 99}') for _ in range(3)]""",
        r"""os.write(3, b"{")""",
        """os.write(3, b"x" * 60000)""",
    ):
        for number, tests in enumerate((Tests("f", TESTS.calls[3:]), Tests("f", (), ASSERTIONS.assertions[3:]))):
            alone.run(f"{ANSWER}def f(x):\n    {spoils}\n    return x + 1", tests)
            later = [alone.run(f"def f(x): return x + {n}  # {spoils} {number}", tests).status for n in (1, 2)]
            assert later == ["passed", "failed"], spoils
    alone.close()


def test_an_executor_is_closed_and_pickled(executor):
    other = pickle.loads(pickle.dumps(executor))
    assert (other.isolation, other.limits) == (executor.isolation, executor.limits)
    assert other.run(ADDS_ONE, TESTS).status == "passed"
    other.close()
    assert other.run("def f(x): return x", TESTS).status == "failed"
    other.close()


def test_the_probe_finds_what_a_bare_process_can_do(tmp_path):
    (tmp_path / "secret").touch()
    call = [[str(tmp_path / "secret")], [str(tmp_path)], os.getpid()]
    script = f"import sys\nfrom collections.abc import Callable\n{inspect.getsource(probe)}\nprint(probe(*{call!r}))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    found = {word.split()[0] for word in ast.literal_eval(printed.stdout)}
    assert found == {"read", "list", "write", "open", "signal", "start"}


def test_nothing_is_run_where_nothing_isolates(monkeypatch):
    monkeypatch.setattr("grail_lightning.worlds.programs.probe.refusal", lambda isolation: f"no {isolation}")
    with pytest.raises(RuntimeError, match=r"Nothing isolates programs here \(.*; Sandlock: no Sandlock\(\)\)"):
        Executor()
    with pytest.raises(RuntimeError, match=r"Nothing isolates programs here \(Sandlock: no Sandlock\(\)\)"):
        Executor(Sandlock())
    with pytest.raises(ValueError, match=r"`isolation` must be one such as Bubblewrap\(\), or None, but got 'exec'"):
        Executor("exec")
    for wrong in (0, -1, math.nan, math.inf, 1e300):
        for name in ("seconds", "memory_mb", "output_kb"):
            with pytest.raises(ValueError, match="must be positive and at most"):
                Executor(limits=ProgramLimits(**{name: wrong}))


def test_an_outcome_that_may_be_the_machine_s_fault_is_not_kept():
    executor = Executor(limits=ProgramLimits(seconds=0.1), workers=1)
    spent = executor.run("def f(x):\n    while True: pass", TESTS)
    waited = executor.run("import time\ndef f(x): time.sleep(60)", TESTS)
    assert (spent.status, spent.certain) == ("timeout", True)
    assert (waited.status, waited.certain) == ("timeout", False)
    assert [*executor._kept.values()] == [spent]
    executor.close()


def test_a_missing_system_library_is_named_and_the_next_isolation_is_tried(tmp_path, monkeypatch):
    (tmp_path / "pyseccomp.py").write_text("raise RuntimeError('Unable to find libseccomp')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyseccomp", raising=False)
    assert refusal.__wrapped__(Bubblewrap()) == "Unable to find libseccomp"


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(2**9000, 2**9001) | st.floats(allow_nan=False) | st.text()
) | st.complex_numbers(allow_nan=False)
_HASHABLE = _SCALARS | st.tuples(_SCALARS, _SCALARS) | st.frozensets(_SCALARS, max_size=3)


def _lists_and(more):
    return st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | more(inner), max_leaves=10)


_SETS = st.sets(_HASHABLE, max_size=3)
_LITERALS = _lists_and(
    lambda inner: st.tuples(inner, inner) | _SETS | _SETS.map(frozenset) | st.dictionaries(_HASHABLE, inner, max_size=3)
)
_DATA = _lists_and(lambda inner: st.dictionaries(st.sampled_from("itsfdcx"), inner, max_size=2))


@given(_LITERALS)
def test_literals_survive_the_pipe(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert (back, type(back)) == (value, type(value))


@given(_DATA)
@example({"s": [1.6879446568119407e-108, -7.356590764491143e-239]})  # Two members in one place of the table.
def test_data_of_any_form_are_a_literal_or_a_clear_error(data):
    made = None
    with contextlib.suppress(ValueError):
        made = encode(decode(data))
    assert made is None or encode(decode(made)) == made


@given(st.text())
def test_a_message_is_one_printable_line(text):
    assert line_of(text).isprintable()
