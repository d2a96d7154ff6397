"""Replies that a program forges in the guest's place: what they cost the grader, and what they amount to."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.grade import canonical
from grail_lightning.worlds.programs.guest import decode, encode
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, TestCall, Tests
from grail_lightning.worlds.programs.probe import LOCAL, refusal

# A reply of a million bytes, which is as long as a reply may be here.
LIMITS = ProgramLimits(seconds=3.0, memory_mb=512, output_kb=1024)
_ALIKE = "b','.join(b'%d' % (k * (2**61 - 1)) for k in range(42000))"  # Numbers with one hash.
_PAIRS = "b','.join(b'[%d,0]' % (k * (2**61 - 1)) for k in range(34000))"
# Sets whose members have the same hashes have one hash, too; comparing two of them compares all members.
_SETS = """b','.join(b'{"f":[' + b','.join(b'%d' % ((n + 5000 * k) * (2**61 - 1)) for k in range(7)) + b']}'
        for n in range(4500))"""
_LEVELS = """b','.join(b'{"f":[' + b','.join(b'{"f":[' + b','.join(b'%d' % ((n + 80 * m + 4000 * k) * (2**61 - 1))
        for k in range(8)) + b']}' for m in range(50)) + b']}' for n in range(80))"""
FORGED = {
    "a set of numbers with one hash": (f"""b'{{"ok":{{"s":[' + {_ALIKE} + b']}}}}'""", "failed"),
    "a dictionary of numbers with one hash": (f"""b'{{"ok":{{"d":[' + {_PAIRS} + b']}}}}'""", "failed"),
    "a set in a tuple in a list": (f"""b'{{"ok":[{{"t":[{{"f":[' + {_ALIKE} + b']}}]}}]}}'""", "failed"),
    "sets of sets with one hash": (f"""b'{{"ok":{{"s":[' + {_SETS} + b']}}}}'""", "failed"),
    "sets of sets of sets with one hash": (f"""b'{{"ok":{{"s":[' + {_LEVELS} + b']}}}}'""", "failed"),
    "an integer of 5,000 digits": ("""b'{"ok":' + b'9' * 5000 + b'}'""", "refused"),
    "integers of 4,300 digits": ("""b'{"ok":[' + b','.join([b'9' * 4300] * 240) + b']}'""", "failed"),
    "a hexadecimal integer of a million digits": ("""b'{"ok":{"i":"' + b'f' * 10**6 + b'"}}'""", "failed"),
    "a number of a million decimals": ("""b'{"ok":0.' + b'1' * 10**6 + b'}'""", "failed"),
    "an exponent of a million digits": ("""b'{"ok":1e' + b'9' * 10**6 + b'}'""", "failed"),
    "numbers that are none": ("""b'{"ok":[NaN,Infinity,-Infinity,1e999,{"c":[NaN,1e999]}]}'""", "failed"),
    "a complex number of texts": ("""b'{"ok":{"c":["1","2"]}}'""", "refused"),
    "repeated keys": ("""b'{' + b','.join([b'"ok":4'] * 100000) + b'}'""", "passed"),
    "many keys": ("""b'{' + b','.join(b'"%d":4' % k for k in range(80000)) + b',"ok":3}'""", "failed"),
    "halves of surrogate pairs": (r"""b'{"error":"raised","type":"\\ud83d","message":"\\ud800\\udfff"}'""", "raised"),
    "a text of a million characters": ("""b'{"ok":"' + b'x' * 10**6 + b'"}'""", "failed"),
    "a text of 100,000 zeros": (r"""b'{"ok":"' + b'\\u0000' * 10**5 + b'"}'""", "failed"),
    "a message of a million characters": ("""b'{"error":"raised","message":"' + b' ' * 10**6 + b'"}'""", "raised"),
    "a list where a message belongs": ("""b'{"error":"raised","message":[' + b'0,' * 300000 + b'0]}'""", "raised"),
    "bytes that are no text": ("""b'{"ok":"' + bytes(range(128, 256)) + b'"}'""", "refused"),
    "zeros between": (r"""b'{"ok":\0 4}'""", "refused"),
    "a set of lists": ("""b'{"ok":{"s":[[1],[2]]}}'""", "refused"),
    "a set of a text": ("""b'{"ok":{"s":"444"}}'""", "refused"),
    "a literal with two forms": ("""b'{"ok":{"s":[4],"t":[4]}}'""", "refused"),
    "a literal in no form": ("""b'{"ok":{"x":[4]}}'""", "refused"),
    "a forged text of halves": ("""b'{"ok":{"u":"zz"}}'""", "refused"),
}
ANSWERS = """
import os
def f(x):
    data = {} + b"\\n"
    while data: data = data[os.write(3, data):]
    os._exit(0)
"""
TESTS = Tests("f", (TestCall((3,), 4),))


@pytest.fixture(scope="module")
def native():
    """A sandbox in which a program can write to its connection."""
    if all(refusal(isolation) for isolation in LOCAL):
        pytest.skip("neither bubblewrap nor sandlock runs programs here; docs/reference/sandbox.md says what they need")
    made = Executor(None, LIMITS, workers=1)
    yield made
    made.close()


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_reply_costs_the_grader_little(native, name):
    """Processor time of this process, in which sets of a million bytes of numbers with one hash took 24 seconds."""
    data, status = FORGED[name]
    begun = time.process_time()
    outcome = native.run(ANSWERS.format(data), TESTS)
    assert time.process_time() - begun < 2
    assert outcome.status == status, outcome
    assert outcome.message.isprintable()


@pytest.mark.parametrize("place", ["ok", "type", "trace"])
def test_a_reply_that_is_nested_deeply_ends_no_run(native, place):
    """At each depth: what reads JSON gives up at another one than what writes it, or shows it."""
    reply = f"""b'{{"error":"raised","{place}":' + b'[' * %d + b'0' + b']' * %d + b'}}'"""
    programs = [ANSWERS.format(reply % (depth, depth)) for depth in (35, 300, 480, 900, 960, 985)]
    tests = Tests("f", (TestCall((3,), 4),), ("assert f(3) == 4",))
    jobs = [Job(program, tests, trace) for program in programs for trace in (None, 0, 1)]
    for outcome in native.run_many(jobs):
        assert not any(outcome.passed)
        assert outcome.status in ("raised", "refused", "failed"), outcome


def test_arguments_that_are_forged_cost_the_grader_little(native):
    """An assertion's own process reads them, and has a limit of time."""
    alike = _ALIKE.replace("42000", "36000")
    reply = f"""b'{{"ok":4,"arguments":[{{"t":[{{"s":[' + {alike} + b']}}]}},{{"d":[]}}]}}'"""
    begun = time.process_time()
    outcome = native.run(ANSWERS.format(reply), Tests("f", (), ("x = {1}\nassert f(x) == 4",)))
    assert time.process_time() - begun < 2
    assert (outcome.status, outcome.passed) == ("timeout", (False,))


# What counts as equal.


@pytest.mark.parametrize(
    ("shown", "expected", "equal"),
    [
        (r"'\ud83d\ude42'", "🙂", False),
        ("'🙂'", "\ud83d\ude42", False),
        (r"'\ud83d\ude42'", "\ud83d\ude42", True),
        (r"{'\ud83d': ['\udfff\0']}", {"\ud83d": ["\udfff\0"]}, True),
        ("'🙂'", "🙂", True),
        # As Python's `==`, so that a call and an assertion of one test agree.
        ("True", 1, True),
        ("-0.0", 0.0, True),
        ("{1.0: [True]}", {1: [1 + 0j]}, True),
        ("frozenset({1, 2.0})", {True, 2}, True),
        ("2**53 + 1", 2.0**53, False),
        ("[1]", (1,), False),
        ("float('nan')", float("nan"), False),
        ("'1'", 1, False),
        ("set()", {}, False),
    ],
)
def test_a_result_is_equal_where_python_says_so_by_calls_and_by_assertions(native, shown, expected, equal):
    called = Tests("f", (TestCall((), expected),))
    asserted = Tests("f", (), (f"assert f() == {expected!a}".replace("nan", "float('nan')"),))
    for tests in (called, asserted):
        assert native.run(f"def f(): return {shown}", tests).passed == (equal,)


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 0.0, -0.0, 1.0, 0.5, 2**64, 2.0**64, float("nan"), float("inf"), 1j, 1 + 0j, 2**5000]),
    st.sampled_from(["", "1", "None", "[]", "a,b", "\ud83d", "\ud83d\ude42", "🙂", "'", '"', "\\ud83d", "\0"]),
)
_KEYS = _SCALARS | st.tuples(_SCALARS) | st.tuples(_SCALARS, _SCALARS) | st.frozensets(_SCALARS, max_size=2)
_LITERALS = st.recursive(
    _SCALARS | st.sets(_KEYS, max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2) | st.lists(inner, max_size=2).map(tuple) | st.dictionaries(_KEYS, inner, max_size=2)
    ),
    max_leaves=4,
)


@given(_LITERALS, _LITERALS)
def test_canonical_texts_are_the_same_where_python_says_equal(one, other):
    for a, b in itertools.product((one, other), repeat=2):
        # Received, since in a list an object is equal to itself although it is not a number.
        received = decode(json.loads(json.dumps(encode(b))))
        assert (canonical(encode(a)) == canonical(encode(b))) == (a == received)


def test_what_a_program_writes_to_descriptors_is_discarded(native):
    """Only what goes through `print` and `sys.stdout` is counted and shown."""
    writes = "import os, sys\nfor fd in (1, 2): os.write(fd, b'x' * 3000000)\nsys.__stdout__.write('y')\n"
    assert native.run(f"{writes}def f(x): return x + 1", TESTS).status == "passed"
    assert native.printed(f"{writes}print('z')") == "z\n"
