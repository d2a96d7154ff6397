r"""Short functions from a specification: problems with hidden tests, and programs with known mistakes.

A problem is ``Write f(xs, n). Return the sum of the first 3 numbers that are at most n.``; its reference program::

    def f(xs, n):
        total = 0
        for x in xs[:3]:
            if x <= n:
                total += x
        return total

Each statement may be written with a slip, which is random (``xs[:4]``, ``total -= x``), and some with a misconception,
which the words suggest (``x < n``, ``xs[:2]``, a product that starts at 0).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from grail_lightning.worlds.splits import ProblemSplit, distinct, split_rng

_INDENT, _NUM_TESTS = "    ", 8

# The numbers that a loop goes through: words, expression, and the one that the words suggest.
_SOURCES = (
    ("the numbers", "xs", ""),
    ("the numbers after the first", "xs[1:]", ""),
    ("the numbers from the third on", "xs[2:]", "xs[3:]"),
    ("the numbers before the last", "xs[:-1]", ""),
    ("every second number", "xs[::2]", "xs[1::2]"),
    *((f"the first {k} numbers", f"xs[:{k}]", f"xs[:{k - 1}]") for k in (3, 4)),
    *((f"the last {k} numbers", f"xs[-{k}:]", "") for k in (3, 4)),
)
_CONDITIONS = (
    ("at most {}", "x <= {}", "x < {}"),
    ("at least {}", "x >= {}", "x > {}"),
    ("below {}", "x < {}", ""),
    ("above {}", "x > {}", ""),
    ("even", "x % 2 == 0", ""),
    ("odd", "x % 2 == 1", ""),
    ("no multiples of 3", "x % 3 != 0", ""),
)
# What is done to each number: words before and behind the source, expression, and the one that the words suggest.
_CHANGES = (
    ("twice ", "", "x * 2", ""),
    ("the squares of ", "", "x * x", "x * 2"),
    ("", ", each plus n", "x + n", ""),
    *(("", f", each plus {k}", f"x + {k}", "") for k in (1, 2, 3)),
    *(("", f", each minus {k}", f"x - {k}", "") for k in (1, 2)),
)
# Results: sentence, first statement and the one that the words suggest; then the statements that take a number in, with
# their depths, the value as {}, and the one that words suggest, where {1} is the value that they suggest.
_RESULTS: dict[str, tuple[Any, ...]] = {
    "sum": ("Return the sum of {}.", "total = 0", "", (0, "total += {}", "total += {1}")),
    "product": ("Return the product of {}.", "total = 1", "total = 0", (0, "total *= {}", "total *= {1}")),
    "count": ("Return how many of {numbers} are {words}.", "total = 0", "", (0, "total += 1", "total += x")),
    "largest": (
        *("Return the largest of {}, at least 0.", "total = 0", ""),
        *((0, "if {} > total:", ""), (1, "total = {}", "total = {1}")),
    ),
    "list": ("Return the list of {}.", "out = []", "", (0, "out.append({})", "out.append({1})")),
    "backwards": (
        *("Return the list of {}, the last one first.", "out = []", ""),
        *((0, "out.insert(0, {})", "out.append({0})"),),
    ),
}
_SWAPS: dict[str, tuple[str, ...]] = {
    **{"<=": ("<", ">="), ">=": (">", "<="), "<": ("<=", ">"), ">": (">=", "<"), "==": ("!=",), "!=": ("==",)},
    **{"+=": ("-=", "="), "-=": ("+=",), "*=": ("+=", "="), "+": ("-",), "-": ("+",), "*": ("+",)},
    **{"n": ("m",), "m": ("n",), "xs:": ("xs[1:]:", "xs[:-1]:"), "append(": ("insert(0, ",)},
    **{"insert(0, ": ("append(",), "break": ("continue",), "return total": ("return x",), "return out": ("return xs",)},
}
_TOKEN = re.compile(r"return (?:total|out)|insert\(0, |append\(|break|xs:|[<>=!+*-]=|[<>+*-]|\d+|\b[nm]\b")


def slips(statement: str) -> list[str]:
    """The statement with one part changed: an operator, a number by one, a name; or without its colon."""
    changed = [statement[:-1]] if statement.endswith(":") else []
    for token in _TOKEN.finditer(statement):
        number = int(token[0]) if token[0].isdigit() else None
        others = _SWAPS.get(token[0], ()) if number is None else [str(k) for k in (number - 1, number + 1) if k >= 0]
        changed += [statement[: token.start()] + other + statement[token.end() :] for other in others]
    return changed


class Line(NamedTuple):
    """A line of a reference program."""

    depth: int  # Levels of indentation.
    text: str
    tempting: str = ""  # The wrong statement that the words suggest, if there is one.


@dataclass(frozen=True)
class FunctionProblem:
    """A specification, and the statements of its reference program."""

    text: str
    lines: tuple[Line, ...]

    @property
    def program(self) -> str:
        """The reference program."""
        return "\n".join(_INDENT * line.depth + line.text for line in self.lines)

    def row(self) -> dict[str, Any]:
        """The columns of the problem; see `FunctionSpace.sample`."""
        # Numbers close to the constants of problems tell programs apart, and more of them than slices take.
        rng, values = random.Random(self.text), [k for k in range(-4, 11) if k]  # noqa: S311 - tests, not secrets
        lengths = [0, *(rng.randint(4, 8) for _ in range(_NUM_TESTS - 1))]
        inputs = [([rng.choice(values) for _ in range(length)], rng.randint(1, 6)) for length in lengths]
        names: dict[str, Any] = {}
        exec(self.program, names)  # noqa: S102 - our own text, never a model's
        return {
            "problem": self.text,
            "entry": "f",
            "tests": [[[xs, n], names["f"](xs, n)] for xs, n in inputs],
            "reference": self.program,
            "tempting": [line.tempting for line in self.lines],
            "statements": sum(line.text != "else:" for line in self.lines[1:]),
        }


def function_demonstration(
    problem: FunctionProblem, rng: random.Random, slip_rate: float = 0.0, misconception_rate: float = 0.0
) -> str:
    """The program in a fenced block. A statement may have a slip or, where words suggest one, a misconception."""
    lines = []
    for line in problem.lines:
        text, wrong = line.text, [] if line.text.startswith(("def", "else")) else slips(line.text)
        if line.tempting and rng.random() < misconception_rate:
            text = line.tempting
        elif wrong and rng.random() < slip_rate:
            text = rng.choice(wrong)
        lines.append(_INDENT * line.depth + text)
    return "\n".join(["```python", *lines, "```"])


@dataclass(frozen=True)
class FunctionSpace:
    """The set of all specifications of functions, from which seeded draws are made.

    Every problem belongs permanently to one split, by a hash of its text: 80 % train, 10 % validation, 10 % test. Draws
    for different splits are therefore disjoint, whatever their seeds, sizes and options.

    Attributes:
        min_statements: The smallest number of statements of a function's body, from 4 on.
        max_statements: The largest number of statements of a function's body, up to 8.
    """

    min_statements: int = 4
    max_statements: int = 8

    def __post_init__(self) -> None:
        if not 4 <= self.min_statements <= self.max_statements <= 8:
            raise ValueError(f"`problems` must have 4 <= min_statements <= max_statements <= 8, but got {self}.")

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[dict[str, Any]]:
        """Different problems of one split, always the same for the same arguments, as rows.

        Their columns are those of `CodeTask`, `tempting` (the misconception of each line of the reference, or an empty
        text) and `statements` (the number of statements of the body).
        """
        return [problem.row() for problem in self.draw(num_problems, split, seed)]

    def draw(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[FunctionProblem]:
        """The problems of `sample`."""
        rng = split_rng(split, seed, "functions-")
        return distinct(lambda: self._draw(rng), lambda problem: problem.text, num_problems, split, "`max_statements`")

    def _draw(self, rng: random.Random) -> FunctionProblem:
        while True:
            text, lines = _write(rng)
            if self.min_statements <= sum(line.text != "else:" for line in lines[1:]) <= self.max_statements:
                return FunctionProblem(text, tuple(lines))


def _write(rng: random.Random) -> tuple[str, list[Line]]:
    """A random problem: its sentences, and the lines of its program."""
    operand = rng.choice(("n", "n", "m", "2", "3", "4", "5"))
    kind = rng.choice([*_RESULTS])
    lines, behind = [Line(0, "def f(xs, n):")], list[str]()
    if operand == "m":
        words, sign, number = rng.choice((("plus", "+", 1), ("plus", "+", 2), ("minus", "-", 1), ("times", "*", 2)))
        behind.append(f"Here m is n {words} {number}.")
        lines.append(Line(1, f"m = n {sign} {number}"))
    _, start, tempting, *_ = _RESULTS[kind]
    loop, sentence = _loop(rng, kind, operand, behind)
    lines += [Line(1, start, tempting), *loop, *_end(rng, kind, behind), Line(1, f"return {start.split()[0]}")]
    return " ".join(["Write f(xs, n).", sentence, *behind]), lines


def _loop(rng: random.Random, kind: str, operand: str, behind: list[str]) -> tuple[list[Line], str]:
    """The loop, and the sentence of the result; further sentences are appended to `behind`."""
    sentence, _, _, *updates = _RESULTS[kind]
    numbers, source, other = rng.choice(_SOURCES)
    lines, conditions = [Line(1, f"for x in {source}:", other and f"for x in {other}:")], list(_CONDITIONS)
    if operand == "m":
        conditions = conditions[:4]
    if rng.random() < 0.2:
        behind.append(f"Stop at the first number above {operand}.")
        lines += [Line(2, f"if x > {operand}:"), Line(3, "break", "continue")]
        conditions = list(_CONDITIONS[4:])
    words = ""
    if kind == "count" or (len(lines) == 1 and operand == "m") or rng.random() < 0.7:
        words, condition, other = (part.format(operand) for part in rng.choice(conditions))
        lines.append(Line(2, f"if {condition}:", other and f"if {other}:"))
    before, after, value, other = ("", "", "x", "")
    if kind != "count" and rng.random() < 0.6:
        before, after, value, other = rng.choice(_CHANGES)
    for depth, text, tempting in updates:
        valid = other or "{1}" not in tempting
        lines.append(Line(2 + bool(words) + depth, text.format(value), tempting.format(value, other) if valid else ""))
    if kind == "sum" and words and value == "x" and rng.random() < 0.5:
        behind.append("Subtract the others.")
        lines += [Line(2, "else:"), Line(3, "total -= x")]
    chosen = f"{before}{numbers}" + (f" that are {words}" if words else "") + after
    return lines, sentence.format(chosen, numbers=numbers, words=words)


def _end(rng: random.Random, kind: str, behind: list[str]) -> list[Line]:
    """What is done with the result; sentences are appended to `behind`."""
    if kind == "list" and rng.random() < 0.3:
        behind.append("Sort the list.")
        return [Line(1, "out.sort()")]
    if kind in ("list", "backwards") or rng.random() >= 0.4:
        return []
    if rng.random() < 0.5:
        behind.append("Add n to the result.")
        return [Line(1, "total += n")]
    most = rng.choice((9, 10, 12))
    behind.append(f"If the result is above {most}, return {most}.")
    return [Line(1, f"if total > {most}:"), Line(2, f"return {most}")]
