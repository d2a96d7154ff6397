r"""Chains of additions and subtractions: problems, their splits, and demonstrations with known mistakes.

A problem is an expression such as ``7+5-3+8``. It is computed from left to right, in one line for each operator::

    7+5=12
    12-3=9
    9+8=17
    \boxed{17}
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
FILLERS = ("Next", "So far so good", "Let me go on", "Then")
_SHARES: dict[Split, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}
_LARGEST_SLIP = 9

_EXPRESSION = re.compile(r"[0-9]{1,9}([+-][0-9]{1,9})+")


@dataclass(frozen=True)
class Problem:
    """``operands[0] operators[0] operands[1] …``, evaluated from left to right.

    Attributes:
        operands: At least two numbers that are not negative.
        operators: The operator between each two operands: ``+`` or ``-``, in word problems ``*``, too.
    """

    operands: tuple[int, ...]
    operators: str

    @classmethod
    def parse(cls, expression: str) -> Problem:
        """The problem of an expression such as ``7+5-3+8``.

        Raises:
            ValueError: If the expression has another form.
        """
        if not _EXPRESSION.fullmatch(expression):
            raise ValueError(
                f"An arithmetic problem must be whole numbers joined by + and -, such as '7+5-3+8', "
                f"but got {expression!r}."
            )
        numbers = re.split(r"[+-]", expression)
        return cls(tuple(map(int, numbers)), re.sub("[0-9]", "", expression))

    @property
    def expression(self) -> str:
        """The problem as text, such as ``7+5-3+8``."""
        return str(self.operands[0]) + "".join(f"{sign}{b}" for sign, b in self.terms)

    @cached_property
    def terms(self) -> tuple[tuple[str, int], ...]:
        """Each operator with the operand that follows it."""
        return tuple(zip(self.operators, self.operands[1:], strict=True))

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The running total before the first operator and after each: ``7, 12, 9, 17``."""
        totals = [self.operands[0]]
        for sign, b in self.terms:
            totals.append(calculate(totals[-1], sign, b))
        return tuple(totals)

    @property
    def answer(self) -> int:
        """The value of the expression."""
        return self.totals[-1]


@dataclass(frozen=True)
class ProblemSpace:
    """The set of all problems of a kind, from which seeded draws are made.

    Every problem belongs permanently to one split, by a hash of its text: 80 % train, 10 % validation, 10 % test. Draws
    for different splits are therefore disjoint, whatever their seeds, sizes and options.

    Attributes:
        min_terms: The smallest number of operands in an expression.
        max_terms: The largest number of operands in an expression.
        min_operand: The smallest operand.
        max_operand: The largest operand.
        operators: The operators that occur, ``+`` or ``-`` or both.
    """

    min_terms: int = 5
    max_terms: int = 5
    min_operand: int = 1
    max_operand: int = 9
    operators: str = "+-"

    def __post_init__(self) -> None:
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                f"`min_terms` and `max_terms` must satisfy 2 <= min_terms <= max_terms, "
                f"but got {self.min_terms} and {self.max_terms}."
            )
        if not 0 <= self.min_operand <= self.max_operand < 10**9:
            raise ValueError(
                f"`min_operand` and `max_operand` must satisfy 0 <= min_operand <= max_operand < 10^9, "
                f"but got {self.min_operand} and {self.max_operand}."
            )
        if self.operators not in ("+", "-", "+-", "-+"):
            raise ValueError(f"`operators` must be '+', '-' or '+-', but got {self.operators!r}.")

    @property
    def size(self) -> int:
        """The number of problems in all splits."""
        operands, signs = self.max_operand - self.min_operand + 1, len(self.operators)
        return sum(operands**n * signs ** (n - 1) for n in range(self.min_terms, self.max_terms + 1))

    def sample(self, num_problems: int, split: Split, seed: int = 0) -> list[Problem]:
        """Distinct problems of one split, always the same for the same arguments.

        Args:
            num_problems: The number of problems.
            split: The split: train, validation or test.
            seed: The seed of the choice among the problems of the split.

        Raises:
            ValueError: If the split is unknown or holds fewer problems.
        """
        rng = split_rng(split, seed)
        # Rejecting repeated draws is quick only as long as most draws are new.
        if num_problems <= 0.5 * _SHARES[split] * self.size:
            return self._draw(num_problems, split, rng)
        return self._choose(num_problems, split, rng)

    def _draw(self, num_problems: int, split: Split, rng: random.Random) -> list[Problem]:
        drawn: dict[str, Problem] = {}
        while len(drawn) < num_problems:
            num_terms = rng.randint(self.min_terms, self.max_terms)
            operands = tuple(rng.randint(self.min_operand, self.max_operand) for _ in range(num_terms))
            problem = Problem(operands, "".join(rng.choices(self.operators, k=num_terms - 1)))
            if split_of(problem.expression) == split:
                drawn[problem.expression] = problem
        return list(drawn.values())

    def _choose(self, num_problems: int, split: Split, rng: random.Random) -> list[Problem]:
        # A space smaller than the request is too small and need not be enumerated.
        found = [p for p in self._all() if split_of(p.expression) == split] if num_problems <= self.size else None
        if found is None or len(found) < num_problems:
            available = f"{len(found)} problems" if found is not None else f"fewer than {self.size} problems"
            raise ValueError(
                f"`num_problems` must not exceed what the {split} split holds ({available}), but got {num_problems}. "
                "Ask for fewer, or widen `max_terms` or `max_operand`."
            )
        return rng.sample(found, num_problems)

    def _all(self) -> Iterator[Problem]:
        numbers = range(self.min_operand, self.max_operand + 1)
        for num_terms in range(self.min_terms, self.max_terms + 1):
            for operands in itertools.product(numbers, repeat=num_terms):
                for signs in itertools.product(self.operators, repeat=num_terms - 1):
                    yield Problem(operands, "".join(signs))


def split_rng(split: Split, seed: int, kind: str = "") -> random.Random:
    """The random numbers by which problems of a split are chosen, other ones for each kind of problem.

    Raises:
        ValueError: If the split is unknown.
    """
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}, but got {split!r}.")
    return random.Random(f"{kind}{split}-{seed}")  # noqa: S311 - problems, not secrets


def split_of(expression: str) -> Split:
    """The split of a problem, by a hash of its text that does not depend on machine or run."""
    bucket = int.from_bytes(hashlib.blake2b(expression.encode(), digest_size=8).digest(), "big") % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def calculate(a: int, sign: str, b: int) -> int:
    """The value of ``a+b``, ``a-b`` or ``a*b``."""
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def misconception(a: int, sign: str, b: int) -> int | None:
    """The result of an addition with a forgotten carry; None if there is no carry.

    A carry occurs if ``a`` is not negative and the unit digits sum to ten or more. The result is then ten too small:
    ``7+5=2``, ``17+5=12``, but ``12+5=17`` and ``17-5=12``.
    """
    if sign == "+" and a >= 0 and a % 10 + b % 10 >= 10:
        return a + b - 10
    return None


def _mistaken(a: int, sign: str, b: int, rng: random.Random, slip_rate: float, misconception_rate: float) -> int:
    """The result of a computation with random mistakes; the arguments are those of `demonstration`."""
    right, tempting = calculate(a, sign, b), misconception(a, sign, b)
    if tempting is not None and rng.random() < misconception_rate:
        return tempting
    if rng.random() < slip_rate:
        # A slip is off by less than ten, so that it never equals a forgotten carry.
        return rng.choice([right + d for d in range(-_LARGEST_SLIP, _LARGEST_SLIP + 1) if d])
    return right


def demonstration(
    problem: Problem,
    rng: random.Random,
    slip_rate: float = 0.0,
    misconception_rate: float = 0.0,
    filler_rate: float = 0.0,
) -> str:
    r"""A solution with random mistakes, which continues consistently from a wrong result.

    Args:
        problem: The problem to solve.
        rng: The random numbers that decide where the mistakes are.
        slip_rate: The probability that a line gets a random wrong result, off by at most nine.
        misconception_rate: The probability that a line with a carry forgets it.
        filler_rate: The probability of a line without content before a line.

    Returns:
        Lines ``a+b=c``, then ``\boxed{c}``.
    """
    rates = slip_rate, misconception_rate, filler_rate
    lines, total = worked_lines(problem, problem.operators, lambda _, a, sign, b, c: f"{a}{sign}{b}={c}", rng, rates)
    return "\n".join([*lines, f"\\boxed{{{total}}}"])


def worked_lines(
    problem: Problem,
    suggested: str,
    line: Callable[[int, int, str, int, int], str],
    rng: random.Random,
    rates: tuple[float, float, float],
) -> tuple[list[str], int]:
    """The lines of a solution with random mistakes, at the rates of `demonstration`, and its last result.

    `suggested` holds the operator that the words of each step suggest; to take a wrong one is a misconception. `line`
    makes the line of a step from the step's index, ``a``, sign, ``b`` and result.
    """
    slip_rate, misconception_rate, filler_rate = rates
    lines, total = [], problem.operands[0]
    for step, (sign, b) in enumerate(problem.terms):
        chosen = suggested[step] if suggested[step] != sign and rng.random() < misconception_rate else sign
        result = _mistaken(total, chosen, b, rng, slip_rate, misconception_rate)
        if rng.random() < filler_rate:
            lines.append(rng.choice(FILLERS))
        lines.append(line(step, total, chosen, b, result))
        total = result
    return lines, total
