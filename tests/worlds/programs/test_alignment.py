"""Statements and their characters, the alignment of programs, and the first divergence of traces, by hand."""

import textwrap

import pytest

from grail_lightning.worlds.programs.divergence import (
    MAX_CHARACTERS,
    align_programs,
    first_divergence,
    program_lines,
    read_program,
)
from grail_lightning.worlds.programs.outcome import TestCall, Tests, Visit
from tests.worlds.programs.traced import REFERENCE, InProcess, changed


def program(text):
    return read_program(textwrap.dedent(text).lstrip("\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\ny=2\n", ["x = 1", "y=2"]),
        ("x = 1; y = 2 ;z=3  # three", ["x = 1", "y = 2", "z=3"]),
        ("if a :  b = 1 ; c = 2\nelse: d = 3", ["if a :", "b = 1", "c = 2", "d = 3"]),
        ("if a:\n  b\nelif c:\n  d\nelse:\n  e", ["if a:", "b", "elif c:", "d", "e"]),
        ("def f ( ) :\n\tx = 1\n\n\treturn\tx", ["def f ( ) :", "x = 1", "return\tx"]),
        ("def f(a={1: 2}[1], b=lambda x: x) -> 'A:B':\n  c", ["def f(a={1: 2}[1], b=lambda x: x) -> 'A:B':", "c"]),
        ("größe = 'ä' ; ß=größe+'漢字' ;y = 1", ["größe = 'ä'", "ß=größe+'漢字'", "y = 1"]),
        ("x = (1 +  # one: 1\n     2)\ny = 3", ["x = (1 +  # one: 1\n     2)", "y = 3"]),
        ("if (a # why: so\n   ) : # and: so\n  b", ["if (a # why: so\n   ) :", "b"]),
        ("s = '''a\n  b: c'''\nt = 1", ["s = '''a\n  b: c'''", "t = 1"]),
        ("@one\n@two(k=1)\ndef f():\n  return 1\n", ["@one\n@two(k=1)\ndef f():", "return 1"]),
        ("def f():\n  def g(): return 1\n  return g", ["def f():", "def g():", "return 1", "return g"]),
        ("def f():\n  'What it does.'\n  return 1", ["def f():", "return 1"]),
        ("class A(B, k=1):\n  x: int = 1", ["class A(B, k=1):", "x: int = 1"]),
        ("try:\n  a\nexcept (B, C) as d :\n  e\nelse:\n  f", ["try:", "a", "except (B, C) as d :", *"ef"]),
        ("with (a as b,\n      c): d", ["with (a as b,\n      c):", "d"]),
        ("match a:\n  case [b, 1] if c: d\n  case _:\n    e", ["match a:", "case [b, 1] if c:", "d", "case _:", "e"]),
        ("for i in range(3):\r\n  x = i\r\n  y", ["for i in range(3):", "x = i", "y"]),
        ("for i in a:\r  x\ry", ["for i in a:", "x", "y"]),
        ("x = 'a\x0cb\u2028c' ; y\nz", ["x = 'a\x0cb\u2028c'", "y", "z"]),
        ("\x0cx = 1\n\x0cy = 2", ["x = 1", "y = 2"]),
        ("while (n := f()) : g()", ["while (n := f()) :", "g()"]),
        ("x = \\\n  1\ny", ["x = \\\n  1", "y"]),
        ("async def f():\n  async for a in b: await c", ["async def f():", "async for a in b:", "await c"]),
        ("", []),
    ],
)  # fmt: skip
def test_statements_have_exact_characters(text, expected):
    assert [text[s.start : s.stop] for s in read_program(text).statements] == expected


def test_lines_of_the_plain_program_lead_to_statements():
    text = "@d\ndef f(a): x = [i\n for i in a]; y = '''1\n2'''; return x\nif f: pass\nelif d: pass"
    found = read_program(text)
    assert found.plain.splitlines() == [
        "@d", "def f(a):", "    x = [i for i in a]", "    y = '1\\n2'", "    return x",
        "if f:", "    pass", "elif d:", "    pass",
    ]  # fmt: skip
    assert [found.at_line.get(line) for line in range(1, 11)] == [0, 0, 1, 2, 3, 4, 5, 6, 7, None]
    assert [statement.function for statement in found.statements] == [-1, 0, 0, 0, -1, -1, -1, -1]


def test_names_are_those_of_the_first_binding():
    """Of each function; what is imported or global holds no data of its own."""
    text = """
        import os.path, sys as system
        def f(a, /, b, *c, d=1, **e):
            import math
            global other
            other = 1
            (g, [h]) = a
            for i in [x for x in b]:
                i += (j := 1)
            try: pass
            except E as k: pass
            def inner(y):
                nonlocal g
                g = z = lambda x: x
            return inner
    """
    own = {name: f"v0.{k}" for k, name in enumerate([*"abcdeghijk", "inner"])}
    assert program(text).names == {1: own, 12: own | {"y": "v1.0", "z": "v1.1"}}


@pytest.mark.parametrize(
    "text",
    [
        "(" * 9000, "-" * 9000 + "1", "not " * 2400 + "1", "1+" * 4990 + "1", "a" + ".a" * 4990, "f" + "()" * 4900,
        "lambda:" * 1400 + "1", "1 if 1 else " * 800 + "1", "f'{" * 100, "x = " + "9" * 9000, "a\0b", "a = '\ud800'",
        "\ufeffx = 1", "x = (", "x = 1" * 2001, "  x = 1\ny = 2", "~" * 9990 + "a", "2**" * 3300 + "2",
        "".join(" " * k + "if 1:\n" for k in range(130)), "return = 1", "match a:\n case " + "[" * 201,
    ],
)  # fmt: skip
def test_texts_that_cannot_be_parsed_are_no_program(text):
    assert read_program(text) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("if 1:\n p\n" + "elif 1:\n p\n" * 800, 1602),
        ("x = '\\d'", 1),
        ("a" + "<a" * 4000, 1),
        ("@a\n" * 3000 + "def f(): pass", 2),
        ("x;" * 4999, 4999),
        ("x" * MAX_CHARACTERS, 1),
    ],
)
def test_odd_texts_are_programs(text, number):
    found = read_program(text)
    assert len(found.statements) == number if found else text.startswith("if")


def test_a_program_that_would_grow_is_not_read():
    assert read_program("".join(f"{' ' * k}if 1:\n" for k in range(60)) + " " * 60 + "a;" * 2000) is None


def test_lines_that_are_not_blank():
    assert program_lines("\n  a b \r\n\t\n\x0cc") == [(2, "  ", "a b", 3), (4, "\x0c", "c", 12)]
    assert program_lines(" \n") == []


# --- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REFERENCE, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
        # Other names, another comparison, an assignment of another form, a docstring, an import, on fewer lines.
        (
            """
            import math
            def total(a, b):
                'Adds up.'
                c: int = 1
                for d in a:
                    if d < b: c = c + d
                return c
            """,
            {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5},
        ),
        # The return is inside the loop: three of six statements are common, and then four.
        ("def total(v, m):\n  r = 0\n  for x in v:\n    r += x\n  return r", {0: 0, 1: 1, 2: 2}),
        ("def total(v, m):\n  r = 0\n  for x in v:\n    if x:\n      r += x\n      return r", {k: k for k in range(5)}),
        # An else in place of a statement after the if.
        ("def total(v, m):\n  return sum(v)", None),
        ("x = 1", None),
        ("", None),
    ],
)
def test_programs_are_aligned_by_their_shape(text, expected):
    assert align_programs(program(text), program(REFERENCE)) == expected
    one, other = program("if a:\n  b\nelse:\n  c"), program("if a:\n  b\n  c")
    assert align_programs(one, other) == {0: 0, 1: 1}, "a branch is part of the shape"


# --- divergence ------------------------------------------------------------------------------------------------------


def blamed(text, arguments, reference=REFERENCE):
    """The text of the statement that is blamed for the difference on one call."""
    own, right = program(text), program(reference)
    tests = Tests(entry="total", calls=(TestCall(arguments, None),))
    traces = [InProcess().run(one.plain, tests, trace=0).trace for one in (own, right)]
    number = first_divergence(own, traces[0], right, traces[1], align_programs(own, right))
    return None if number is None else textwrap.dedent(text).lstrip("\n")[slice(*own.statements[number][:2])]


RECURSIVE = """
    def total(n):
        if n < 2:
            return 1
        m = total(n - 1)
        k = m + total(n - 2)
        return k
"""
CALLING = """
    def add(a):
        b = a + 1
        return b
    def total(n):
        c = add(n) + 1
        d = c
        return d
"""
ARGUMENTS = {REFERENCE: ([1, 5, 3, 9], 5), RECURSIVE: (5,), CALLING: (3,)}


@pytest.mark.parametrize(
    ("reference", "old", "new", "expected"),
    [
        (REFERENCE, "result = 0", "result = 1", "result = 1"),  # its value
        (REFERENCE, "in values", "in values[1:]", "for value in values[1:]:"),  # the value that it binds
        (REFERENCE, "<= limit", "< limit", "if value < limit:"),  # what is executed next
        (REFERENCE, "+= value", "= value", "result = value"),  # only in the second round: 0 + 1 is 1
        (REFERENCE, "return result", "return limit", "return limit"),  # the value that it returns
        (REFERENCE, "return result", "return result / 0", "return result / 0"),  # what it raises
        (REFERENCE, "return result", "return result + 0", None),
        # Recursion keeps calls apart.
        (RECURSIVE, "n < 2", "n <= 2", "if n <= 2:"),
        (RECURSIVE, "return 1", "return 2", "return 2"),
        (RECURSIVE, "n - 1", "n - 2", "m = total(n - 2)"),
        (RECURSIVE, "m = total(n - 1)", "m = total(n - 1) + 1", "m = total(n - 1) + 1"),
        (RECURSIVE, "m + total(n - 2)", "m - total(n - 2)", "k = m - total(n - 2)"),
        (RECURSIVE, "return k", "return m", "return m"),
        # Variables differ after a call.
        (CALLING, "add(n) + 1", "add(n) + 2", "c = add(n) + 2"),
        (CALLING, "add(n)", "add(n + 1)", "c = add(n + 1) + 1"),
        (CALLING, "a + 1", "a + 2", "b = a + 2"),
    ],
)
def test_the_statement_that_departs_is_blamed(reference, old, new, expected):
    assert blamed(changed(old, new, reference), ARGUMENTS[reference], reference) == expected


FIRST = """
    def total(values, limit):
        result = 0
        for value in values:
            if value > limit:
                break
            result += value
        return result
"""
EARLY = [
    # At the end of the loop, after the statement in the `if` or after the `if` alone; and in the `if`.
    ("                result += value\n", "            return result\n", [1, 5, 3], "return result"),
    ("                result += value\n", "            return result\n", [9, 5, 3], "return result"),
    ("                result += value\n", "                return result\n", [9, 5, 3], "return result"),
]


@pytest.mark.parametrize(("behind", "added", "values", "expected"), EARLY)
def test_a_return_too_early_is_blamed_itself(behind, added, values, expected):
    """The statement before it went the same way as that of the reference."""
    text = changed(behind, behind + added)
    own, arguments = program(text), (values, 5)
    tests, right = Tests(entry="total", calls=(TestCall(arguments, None),)), program(REFERENCE)
    traces = [InProcess().run(one.plain, tests, trace=0).trace for one in (own, right)]
    number = first_divergence(own, traces[0], right, traces[1], align_programs(own, right))
    assert own.statements[number].start == textwrap.dedent(text).lstrip("\n").index(expected)


def test_a_statement_that_goes_another_way_is_blamed_before_a_return_that_the_reference_does_not_have():
    text = changed("if value <= limit:\n                result += value", "if value > limit:\n                return 0")
    assert blamed(text, ([1, 9], 5)) == "if value > limit:"
    # What calls a function that the reference does not have is to blame, not the function.
    helper = "def add(a, b):\n    c = a + b\n    return c\n"
    calling = changed("return result", "return add(result, 1)", textwrap.dedent(REFERENCE).lstrip("\n"))
    assert blamed(f"{calling}{helper}", ([1], 5)) == "return add(result, 1)"


@pytest.mark.parametrize(("old", "new"), [("break", "continue"), ("break", "pass"), ("continue", "break")])
def test_break_continue_and_pass_correspond(old, new):
    """What follows them in the text is the same in both programs, and is not blamed when it is executed first."""
    reference = FIRST.replace("break", old)
    assert blamed(changed(old, new, reference), ([1, 9, 2], 5), reference) == new


RIGHT = textwrap.dedent(REFERENCE)
HEAD = "def total(values, limit):\n"


@pytest.mark.parametrize(
    ("other", "reference"),
    [
        ("import math\n" + RIGHT, RIGHT),
        ("from typing import List\n" + RIGHT, RIGHT),
        ("def idle(values):\n    return values\n" + RIGHT, "def idle(x):\n    return x\n" + RIGHT),
        (changed(HEAD, f"{HEAD}    import math\n", RIGHT), changed(HEAD, f"{HEAD}    import os\n", RIGHT)),
        (changed("= 0", "= 0.0", RIGHT), RIGHT),
        (changed("= 0", "= False", RIGHT), RIGHT),
        (RIGHT.replace("result", "r"), RIGHT),
    ],
)
def test_imports_other_names_and_kinds_of_equal_numbers_are_no_divergence(other, reference):
    """Nor do they hide the statement that is to blame."""
    assert blamed(other, ARGUMENTS[REFERENCE], reference) is None
    assert blamed(changed("<= limit", "< limit", other), ARGUMENTS[REFERENCE], reference) == "if value < limit:"


def test_a_statement_without_a_counterpart_is_blamed_where_neither_program_has_one():
    """The programs part in shape after `if`: both go into it, and execute different kinds of statements."""
    text = changed("result += value", "value.bit_length()")
    assert blamed(text, ([1], 5)) == "value.bit_length()"
    # Here only the reference goes into the `if`, so that the `if` is to blame.
    assert blamed(changed("<= limit", "< 0", text), ([1], 5)) == "if value < 0:"


def test_visits_of_hostile_traces_are_only_data():
    own = program(REFERENCE)
    pairs = align_programs(own, own)
    odd = [
        Visit(line, event, (("a", "b"),) * 3, "c", -line) for line in (-1, 0, 2, 3, 99) for event in ("line", "return")
    ]
    right = InProcess().run(own.plain, Tests(entry="total", calls=(TestCall(([1], 1), 1),)), trace=0).trace
    assert first_divergence(own, odd, own, right, pairs) == 1
    assert first_divergence(own, right, own, odd, pairs) == 1
