"""Comparison of a response, line by line, with the chain of computations that solves its problem.

Every search takes time linear in the response, which is untrusted text and is never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from grail_lightning.answers import AnswerSpan
from grail_lightning.tasks.base import Step, StepKind
from grail_lightning.tasks.problems import Problem, calculate, misconception

# At most nine digits: Python raises above its own limit, and the conversion takes quadratic time.
NUMBER = r"-?[0-9]{1,9}"
_INTEGER = re.compile(NUMBER)
_ATTEMPT = re.compile(r"[0-9=]")
_LINE = re.compile(r"[^\n]+")


def equation(signs: str) -> re.Pattern[str]:
    """The pattern of a line with one equation ``a+b=c``, which may stand among words and blanks.

    Its groups are `a`, `term` (`sign` and `b`) and `c`.

    Args:
        signs: The operators that may stand in the equation.
    """
    sign = "".join(re.escape(one) for one in signs)
    words = rf"[^0-9=+\-{sign}]*"
    return re.compile(
        rf"{words}(?P<a>{NUMBER}) ?(?P<term>(?P<sign>[{sign}]) ?(?P<b>[0-9]{{1,9}})) ?= ?(?P<c>{NUMBER}){words}"
    )


@dataclass
class Chain:
    """Compares a response with its problem.

    `due` is the number of terms that are done, `value` the total that the response states after them.
    """

    problem: Problem
    due: int = 0
    value: int = 0
    pattern: ClassVar[re.Pattern[str]] = equation("+-")

    def __post_init__(self) -> None:
        self.value = self.problem.operands[0]

    def label(self, text: str, answers: Sequence[AnswerSpan]) -> list[Step]:
        """The steps of a response.

        Args:
            text: The response.
            answers: Its answers, in order of appearance.
        """
        steps: list[Step] = []
        for part in _parts(text, answers):
            steps += self._answer(text, part) if isinstance(part, AnswerSpan) else self._line(text, *part)
        return steps

    def _line(self, text: str, start: int, stop: int) -> list[Step]:
        match = self.pattern.fullmatch(text, start, stop)
        if match is None:
            kind: StepKind = "slip" if _ATTEMPT.search(text, start, stop) else "filler"
            return [Step(start=start, stop=stop, kind=kind)]
        steps = self.steps(match)
        self.value, self.due = int(match["c"]), self.advance(match["sign"], int(match["b"]))
        return steps

    def _answer(self, text: str, span: AnswerSpan) -> list[Step]:
        content = text[span.content_start : span.content_stop].strip()
        if _INTEGER.fullmatch(content) and int(content) in (self._rest(), self.problem.answer):
            return []
        return [Step(start=span.start, stop=span.stop, kind="slip", result=(span.content_start, span.content_stop))]

    def _rest(self) -> int:
        """The value that the rest of the problem gives from the last line."""
        value = self.value
        for sign, b in self.problem.terms[self.due :]:
            value = calculate(value, sign, b)
        return value

    def steps(self, match: re.Match[str]) -> list[Step]:
        """The steps of a line ``a sign b = c``."""
        kind, part = self._classify(int(match["a"]), match["sign"], int(match["b"]), int(match["c"]))
        return [Step(start=match.start(), stop=match.end(), kind=kind, result=match.span(part))]

    def _classify(self, a: int, sign: str, b: int, c: int) -> tuple[StepKind, str]:
        """The kind of a line ``a sign b = c``, and the name of the part that decides it."""
        right = self.problem.totals[self.due]
        if a not in (self.value, right):
            return "slip", "a"
        if not self.is_term(self.due, sign, b):
            return "slip", "term"
        if (wrong := wrong_result(a, sign, b, c)) is not None:
            return wrong, "c"
        return ("sound" if a == right else "inherited"), "c"

    def advance(self, sign: str, b: int) -> int:
        """The number of terms that are done after a line with this term."""
        for done, index in ((1, 0), (2, 1), (0, -1)):
            if self.is_term(self.due + index, sign, b):
                return self.due + done
        return min(self.due + 1, len(self.problem.terms))

    def is_term(self, index: int, sign: str, b: int) -> bool:
        """Whether this is the term at an index, which may lie outside the problem."""
        return 0 <= index < len(self.problem.terms) and self.problem.terms[index] == (sign, b)


def wrong_result(a: int, sign: str, b: int, c: int) -> StepKind | None:
    """The kind of error of ``a sign b = c``: misconception for exactly the forgotten carry; None for a right result."""
    if c == calculate(a, sign, b):
        return None
    return "misconception" if c == misconception(a, sign, b) else "slip"


def _parts(text: str, answers: Sequence[AnswerSpan]) -> Iterator[AnswerSpan | tuple[int, int]]:
    """The answers and, between them, the ranges of the lines that are not empty."""
    cursor = 0
    for span in answers:
        yield from (line.span() for line in _LINE.finditer(text, cursor, span.start))
        yield span
        cursor = span.stop
    yield from (line.span() for line in _LINE.finditer(text, cursor))
