r"""Chains of additions and subtractions: problems, the task with its labels, and demonstrations with known mistakes.

A problem is an expression such as ``7+5-3+8``. It is computed from left to right, in one line for each operator. The
labels that `ArithmeticTask.label_steps` gives to a response to ``Compute 7+5-3+8.``::

    Then          filler          no digit and no equals sign
    7+5=2         misconception   exactly the forgotten carry (`misconception`)
    2-3=-1        inherited       right in itself, but computed from a wrong result
    -1+8=6        slip            any other wrong result
    \boxed{6}     (no step)       copies the last result

A response is untrusted text: every search takes time linear in it, and nothing is evaluated.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from grail_lightning.answers.find import Boxed
from grail_lightning.answers.records import AnswerSpan
from grail_lightning.core.records.task import Prompt, Step, StepKind
from grail_lightning.core.tasks.answered import AnswerTask
from grail_lightning.core.tasks.rewards import Rewards
from grail_lightning.worlds.splits import ProblemSplit, distinct, split_rng

FILLERS = ("Next", "So far so good", "Let me go on", "Then")
_LARGEST_SLIP = 9

_EXPRESSION = re.compile(r"[0-9]{1,9}([+-][0-9]{1,9})+")
# At most nine digits: Python raises above its own limit, and the conversion takes quadratic time.
_NUMBER = r"-?[0-9]{1,9}"
_INTEGER = re.compile(_NUMBER)
_ATTEMPT = re.compile(r"[0-9=]")
_LINE = re.compile(r"[^\n]+")


@dataclass(frozen=True)
class Problem:
    """``operands[0] operators[0] operands[1] …``, evaluated from left to right."""

    operands: tuple[int, ...]  # At least two, none of them negative.
    operators: str  # + or - between each two operands; in word problems * too.

    @classmethod
    def parse(cls, expression: str) -> Problem:
        """The problem of an expression such as ``7+5-3+8``; a ValueError if it has another form."""
        if not _EXPRESSION.fullmatch(expression):
            raise ValueError(
                "An arithmetic problem must be whole numbers joined by + and -, such as '7+5-3+8', but got "
                f"{expression!r}."
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
        numbers = 2 <= self.min_terms <= self.max_terms and 0 <= self.min_operand <= self.max_operand < 10**9
        if not numbers or self.operators not in ("+", "-", "+-", "-+"):
            raise ValueError(
                "`problems` must have 2 <= min_terms <= max_terms, 0 <= min_operand <= max_operand < 10^9, and the "
                f"operators '+', '-' or '+-', but got {self}."
            )

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[dict[str, str]]:
        """Distinct problems of one split, always the same for the same arguments, as rows.

        Their columns are `problem`, an expression, and `answer`.
        """
        problems = self.draw(num_problems, split, seed)
        return [{"problem": problem.expression, "answer": str(problem.answer)} for problem in problems]

    def draw(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[Problem]:
        """The problems of `sample`."""
        rng = split_rng(split, seed)
        operands, signs = self.max_operand - self.min_operand + 1, len(self.operators)
        size = sum(operands**n * signs ** (n - 1) for n in range(self.min_terms, self.max_terms + 1))
        if num_problems > size:
            raise ValueError(f"All splits hold {size} problems, but got {num_problems}. Widen `max_terms`, say.")

        def draw() -> Problem:
            num_terms = rng.randint(self.min_terms, self.max_terms)
            operands = tuple(rng.randint(self.min_operand, self.max_operand) for _ in range(num_terms))
            return Problem(operands, "".join(rng.choices(self.operators, k=num_terms - 1)))

        return distinct(draw, lambda problem: problem.expression, num_problems, split, "`max_terms` or `max_operand`")


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


def demonstration(
    problem: Problem,
    rng: random.Random,
    slip_rate: float = 0.0,
    misconception_rate: float = 0.0,
    filler_rate: float = 0.0,
) -> str:
    r"""A solution with random mistakes, which continues consistently from a wrong result.

    A line gets a random wrong result (off by at most nine) with the probability `slip_rate`; one with a carry forgets
    it with `misconception_rate`; a line without content stands before a line with `filler_rate`.
    """
    lines, total = worked_equations(problem, rng, (slip_rate, misconception_rate, filler_rate))
    return "\n".join([*lines, f"\\boxed{{{total}}}"])


def worked_equations(problem: Problem, rng: random.Random, rates: tuple[float, float, float]) -> tuple[list[str], int]:
    """`worked_lines` of the form ``7+5=12``, whose operators are those of the problem."""
    return worked_lines(problem, problem.operators, lambda _, a, sign, b, c: f"{a}{sign}{b}={c}", rng, rates)


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
        result, tempting = calculate(total, chosen, b), misconception(total, chosen, b)
        if tempting is not None and rng.random() < misconception_rate:
            result = tempting
        elif rng.random() < slip_rate:
            # A slip is off by less than ten, so that it never equals a forgotten carry.
            result = rng.choice([result + d for d in range(-_LARGEST_SLIP, _LARGEST_SLIP + 1) if d])
        if rng.random() < filler_rate:
            lines.append(rng.choice(FILLERS))
        lines.append(line(step, total, chosen, b, result))
        total = result
    return lines, total


def equation(signs: str) -> re.Pattern[str]:
    """The pattern of a line with one equation ``a+b=c`` among words and blanks: groups a, term (sign and b), c."""
    sign = "".join(re.escape(character) for character in signs)
    words = rf"[^0-9=+\-{sign}]*"
    return re.compile(
        rf"{words}(?P<a>{_NUMBER}) ?(?P<term>(?P<sign>[{sign}]) ?(?P<b>[0-9]{{1,9}})) ?= ?(?P<c>{_NUMBER}){words}"
    )


@dataclass
class Chain:
    """Compares a response, line by line, with the computations that solve its problem."""

    problem: Problem
    suggested: str = ""  # The operator that the words of each step suggest; by default the right one.
    due: int = 0  # The number of terms that are done.
    value: int = 0  # The total that the response states after them.
    pattern: ClassVar[re.Pattern[str]] = equation("+-")

    def __post_init__(self) -> None:
        self.value, self.suggested = self.problem.operands[0], self.suggested or self.problem.operators

    def label(self, text: str, answers: Sequence[AnswerSpan]) -> list[Step]:
        """The steps of a response, whose answers are given in order of appearance."""
        sys.audit("grail_lightning.labels", type(self).__name__)
        steps: list[Step] = []
        cursor = 0
        for span in answers:
            steps += self._lines(text, cursor, span.start) + self._answer(text, span)
            cursor = span.stop
        return steps + self._lines(text, cursor, len(text))

    def _lines(self, text: str, start: int, stop: int) -> list[Step]:
        """The steps of the lines in a range that are not empty."""
        return [step for line in _LINE.finditer(text, start, stop) for step in self._line(text, *line.span())]

    def _line(self, text: str, start: int, stop: int) -> list[Step]:
        match = self.pattern.fullmatch(text, start, stop)
        if match is None:
            kind: StepKind = "slip" if _ATTEMPT.search(text, start, stop) else "filler"
            return [Step(start=start, stop=stop, kind=kind)]
        a, sign, b, c = int(match["a"]), match["sign"], int(match["b"]), int(match["c"])
        operation, of_operation = self._operation(a, sign, b)
        result, of_result = self._result(a, sign, b, c, operation)
        steps = self.steps(match, (operation, of_operation), (result, of_result))
        self.value, self.due = c, self.advance(sign, b)
        return steps

    def _answer(self, text: str, span: AnswerSpan) -> list[Step]:
        rest = self.value  # What the rest of the problem gives from the last line.
        for sign, b in self.problem.terms[self.due :]:
            rest = calculate(rest, sign, b)
        content = text[span.content_start : span.content_stop].strip()
        if _INTEGER.fullmatch(content) and int(content) in (rest, self.problem.answer):
            return []
        return [Step(start=span.start, stop=span.stop, kind="slip", result=(span.content_start, span.content_stop))]

    def _operation(self, a: int, sign: str, b: int) -> tuple[StepKind, str]:
        """The kind of what a line computes, and the name of the part that decides it."""
        right = self.problem.totals[self.due]
        if a not in (self.value, right):
            return "slip", "a"
        if self.due == len(self.problem.terms):
            return "slip", "sign"
        if sign != self.problem.operators[self.due]:
            misled = sign == self.suggested[self.due] and b == self.problem.terms[self.due][1]
            return ("misconception" if misled else "slip"), "sign"
        return ("sound" if a == right else "inherited"), "sign"

    def _result(self, a: int, sign: str, b: int, c: int, operation: StepKind) -> tuple[StepKind, str]:
        """The kind of the result of a line, and the name of the part that decides it."""
        if self.due < len(self.problem.terms) and b != self.problem.terms[self.due][1]:
            return "slip", "b"
        if c != calculate(a, sign, b):
            return ("misconception" if c == misconception(a, sign, b) else "slip"), "c"
        return ("sound" if operation == "sound" else "inherited"), "c"

    def steps(self, match: re.Match[str], operation: tuple[StepKind, str], result: tuple[StepKind, str]) -> list[Step]:
        """The step of a line ``a sign b = c``: its first error decides."""
        kind, part = result if operation[0] in ("sound", "inherited") else operation
        part = "term" if part in ("sign", "b") else part
        return [Step(start=match.start(), stop=match.end(), kind=kind, result=match.span(part))]

    def advance(self, sign: str, b: int) -> int:
        """The number of terms that are done after a line with this term."""
        terms = self.problem.terms
        for done, index in ((1, self.due), (2, self.due + 1), (0, self.due - 1)):
            if 0 <= index < len(terms) and terms[index] == (sign, b):
                return self.due + done
        return min(self.due + 1, len(terms))


class ArithmeticTask(AnswerTask):
    r"""The task of computing ``7+5-3+8`` line by line and boxing the result.

    The response to the prompt ``Compute 7+5-3+8.`` is a chain of lines ``7+5=12``, ``12-3=9``, … and ``\boxed{17}``.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.
    """

    def __init__(self, rewards: Rewards | None = None) -> None:
        super().__init__(rewards, Boxed(evaluated=True))

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The row's ``problem`` (an expression such as ``7+5-3+8``) as a prompt."""
        problem = _parse(str(row["problem"]))
        question, columns = f"Compute {problem.expression}.", dict(row)
        return Prompt(
            messages=question, reference=str(problem.answer), task=self, columns=columns, dataset="arithmetic"
        )

    def label_steps(self, text: str, prompt: Prompt) -> list[Step]:
        r"""Label every step of any response, well-formed or not, in time linear in its length.

        A line ``a+b=c`` is compared with the running total, the problem's next term, and their result; the module's
        docstring has an example. A line that returns to the right total is sound again. A slip is also an ``a`` or a
        term that is not the expected one (miscopied, skipped, repeated, one line too many), and a line with digits that
        is no equation. After a skipped or repeated term the chain continues with the term after it.

        A box is no step if it holds the right answer, or the value that the rest of the problem gives from the last
        line. Any other box is a slip. Empty lines are no steps.

        `Step.result` is the range of ``c``; of ``a`` or of the term (with its operator) if this part is miscopied; or
        of a box's content. It is None for filler and for lines that are no equation.
        """
        return Chain(_parse(str(prompt.columns["problem"]))).label(text, self.answer_spans(text))


_parse = lru_cache(maxsize=4096)(Problem.parse)
