r"""The arithmetic task: chains of which every line can be checked, so that the wrong step of a rollout is known.

The labels that `ArithmeticTask.label_steps` gives to the response to ``Compute 7+5-3+8.``::

    Then          filler          no digit and no equals sign
    7+5=2         misconception   exactly the forgotten carry (`grail_lightning.tasks.problems.misconception`)
    2-3=-1        inherited       right in itself, but computed from a wrong result
    -1+8=6        slip            any other wrong result
    \boxed{6}     (no step)       copies the last result
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grail_lightning.answers import Box, find_boxes
from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Prompt, Step, StepKind
from grail_lightning.tasks.problems import Problem, calculate, misconception
from grail_lightning.tasks.rewards import RewardSpec

# At most nine digits: Python raises above its own limit, and the conversion takes quadratic time.
_NUMBER = r"-?[0-9]{1,9}"
_EQUATION = re.compile(
    rf"[^0-9+=-]*(?P<a>{_NUMBER}) ?(?P<term>(?P<sign>[+-]) ?(?P<b>[0-9]{{1,9}})) ?= ?(?P<c>{_NUMBER})[^0-9+=-]*"
)
_INTEGER = re.compile(_NUMBER)
_ATTEMPT = re.compile(r"[0-9=]")
_LINE = re.compile(r"[^\n]+")


class ArithmeticTask(AnswerTask):
    r"""The task of computing ``7+5-3+8`` line by line and boxing the result.

    The response to the prompt ``Compute 7+5-3+8.`` is a chain of lines ``7+5=12``, ``12-3=9``, … and ``\boxed{17}``.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.

    Raises:
        ValueError: If a reward cannot be found, or two have one name.
    """

    def __init__(self, rewards: list[RewardSpec] | None = None) -> None:
        super().__init__(rewards)

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The row's ``problem`` (an expression such as ``7+5-3+8``) as a prompt.

        Raises:
            ValueError: If the column is missing or holds no such expression.
        """
        if "problem" not in row:
            raise ValueError(f"An arithmetic row must have the column `problem`, but got {sorted(row)}.")
        problem = _parse(str(row["problem"]))
        return Prompt(
            messages=f"Compute {problem.expression}.",
            reference=str(problem.answer),
            task=self,
            columns=dict(row),
            dataset="arithmetic",
        )

    def label_steps(self, text: str, prompt: Prompt) -> list[Step]:
        r"""Label every step of any response, well-formed or not, in time linear in its length.

        A line ``a+b=c`` is compared with the expected line: the running total, the problem's next term, and their
        result.

        - sound: The line is the expected one, or returns to the right total after a wrong one.
        - inherited: The line is right in itself, but ``a`` is an earlier wrong result. After two errors that cancel,
          lines are sound again.
        - misconception: ``c`` is the value of ``a+b`` with a forgotten carry.
        - slip: ``c`` is wrong in another way; or ``a`` or the term is not the expected one (miscopied, skipped,
          repeated, one line too many); or the line has digits or an equals sign but is no equation. After a skipped
          or repeated term the chain continues with the term after it.
        - filler: The line has neither a digit nor an equals sign.

        A box is no step if it holds the right answer, or the value that the rest of the problem gives from the last
        line (after a complete chain, the last result). Any other box is a slip. Empty lines are no steps.

        `Step.result` is the range of characters in which an error is, or would be, visible: that of ``c``; that of
        ``a`` or of the term (with its operator) if this part is miscopied; that of a box's content. It is None for
        filler and for lines that are no equation.
        """
        chain = _Chain(_parse(str(prompt.columns["problem"])))
        steps = []
        for part in _parts(text):
            step = chain.box(text, part) if isinstance(part, Box) else chain.line(text, *part)
            if step is not None:
                steps.append(step)
        return steps


_parse = lru_cache(maxsize=4096)(Problem.parse)


def _parts(text: str) -> Iterator[Box | tuple[int, int]]:
    """The complete boxes and, between them, the ranges of the lines that are not empty."""
    cursor = 0
    for box in find_boxes(text):
        yield from (line.span() for line in _LINE.finditer(text, cursor, box.start))
        yield box
        cursor = box.stop
    yield from (line.span() for line in _LINE.finditer(text, cursor))


@dataclass
class _Chain:
    """Compares a response with its problem, line by line.

    `due` is the number of terms that are done, `value` the total that the response states after them.
    """

    problem: Problem
    due: int = 0
    value: int = 0

    def __post_init__(self) -> None:
        self.value = self.problem.operands[0]

    def line(self, text: str, start: int, stop: int) -> Step:
        match = _EQUATION.fullmatch(text, start, stop)
        if match is None:
            kind: StepKind = "slip" if _ATTEMPT.search(text, start, stop) else "filler"
            return Step(start=start, stop=stop, kind=kind)
        a, sign, b, c = int(match["a"]), match["sign"], int(match["b"]), int(match["c"])
        kind, part = self._classify(a, sign, b, c)
        self.value, self.due = c, self._advance((sign, b))
        return Step(start=start, stop=stop, kind=kind, result=match.span(part))

    def box(self, text: str, box: Box) -> Step | None:
        content = text[box.content_start : box.content_stop].strip()
        rest = self.problem.answer - self.problem.totals[self.due]
        if _INTEGER.fullmatch(content) and int(content) in (self.value + rest, self.problem.answer):
            return None
        return Step(start=box.start, stop=box.stop, kind="slip", result=(box.content_start, box.content_stop))

    def _classify(self, a: int, sign: str, b: int, c: int) -> tuple[StepKind, str]:
        """The kind of a line ``a sign b = c``, and the name of the part that decides it."""
        right = self.problem.totals[self.due]
        if a not in (self.value, right):
            return "slip", "a"
        if not self._is_term(self.due, (sign, b)):
            return "slip", "term"
        if c != calculate(a, sign, b):
            return ("misconception" if c == misconception(a, sign, b) else "slip"), "c"
        return ("sound" if a == right else "inherited"), "c"

    def _advance(self, term: tuple[str, int]) -> int:
        """The number of terms that are done after a line with this term."""
        for done, index in ((1, 0), (2, 1), (0, -1)):
            if self._is_term(self.due + index, term):
                return self.due + done
        return min(self.due + 1, len(self.problem.terms))

    def _is_term(self, index: int, term: tuple[str, int]) -> bool:
        return 0 <= index < len(self.problem.terms) and self.problem.terms[index] == term
