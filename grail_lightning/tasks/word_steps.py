r"""The task of word problems whose steps can be checked, so that the wrong step of a rollout is known.

The labels that `WordProblemTask.label_steps` gives to a response to ``Anna has 8 coins. Anna finds 5 coins. Then Anna
has 4 fewer coins than Ben. How many coins does Ben have now?``. Each line has two steps, the operation and the result::

    Then                      filler          no digit and no equals sign
    Anna has 8+               sound
               5=12 coins.    slip            12 instead of 13
    Ben has 12-               misconception   "fewer" suggests the wrong operation
               4=8 coins.     inherited       right in itself, but computed with a wrong operation
    #### 8                    (no step)       copies the last result
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from grail_lightning.answers import Marker
from grail_lightning.tasks.base import Prompt, Step, StepKind
from grail_lightning.tasks.chains import Chain, equation, wrong_result
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.problems import Problem
from grail_lightning.tasks.rewards import Rewards

_SIGNS = "+-*"


class WordProblemTask(MathTask):
    """Word problems with a worked solution, whose answer follows ``####`` and whose steps are labelled.

    Args:
        instruction: The text that is appended to the problem, including its leading space.
        system_prompt: The text of a system turn before the user turn; none by default.
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.

    Raises:
        ValueError: If a text holds a backspace, a reward cannot be found, or two have one name.
    """

    def __init__(self, instruction: str = "", system_prompt: str | None = None, rewards: Rewards | None = None) -> None:
        super().__init__(instruction, system_prompt, rewards, Marker())

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """Label every step of any response, well-formed or not, in time linear in its length.

        The problem's chain of computations is read from the row's column `solution`, and the operators that its words
        suggest from `suggested` (as in the solution, if the column is missing). A line of the response with one
        equation ``a+b=c``, among any words, has two steps.

        The operation, up to the operator, is

        - sound: It is the expected one, applied to the right total.
        - inherited: It is the expected one, but ``a`` is an earlier wrong result.
        - misconception: It is the operation that the words suggest, which is the wrong one, with the problem's number.
        - slip: Another wrong operation, or a miscopied ``a``.

        The result, behind the operator, is sound or inherited as the operation is, inherited behind a wrong operation,
        a misconception if it is that of a forgotten carry, and a slip if it is wrong in another way or ``b`` is not the
        problem's number. Other lines, skipped and repeated steps and answers are as in `ArithmeticTask`.

        `Step.result` is the range of the operator or of ``c``, where an error is, or would be, visible, or of the
        number that is miscopied.

        Returns:
            The steps; None if the solution is no chain of computations.
        """
        solution = prompt.columns.get("solution")
        chain = None if solution is None else _chain(str(solution))
        if chain is None:
            return None
        suggested = str(prompt.columns.get("suggested") or "")
        if len(suggested) != len(chain.terms):
            suggested = chain.operators
        return WordChain(chain, suggested=suggested).label(text, self.answer_spans(text))


@lru_cache(maxsize=4096)
def _chain(solution: str) -> Problem | None:
    """The chain of a worked solution: each line goes on from the result of the line before."""
    found = [match for line in solution.split("\n") if (match := WordChain.pattern.fullmatch(line))]
    if not found:
        return None
    operands = [int(found[0]["a"]), *(int(match["b"]) for match in found)]
    problem = Problem(tuple(operands), "".join(match["sign"] for match in found))
    stated = [operands[0], *(int(match["c"]) for match in found)]
    begun = [int(match["a"]) for match in found]
    return problem if list(problem.totals) == stated and begun == stated[:-1] else None


@dataclass
class WordChain(Chain):
    """Compares a response with its problem; see `Chain`.

    `suggested` holds the operator that the words of each step suggest.
    """

    suggested: str = ""
    pattern: ClassVar[re.Pattern[str]] = equation(_SIGNS)

    def steps(self, match: re.Match[str]) -> list[Step]:
        """The operation and the result of a line ``a sign b = c``."""
        operation, of_operation = self._operation(int(match["a"]), match["sign"], int(match["b"]))
        result, of_result = self._result(match, operation)
        middle = match.end("sign")
        return [
            Step(start=match.start(), stop=middle, kind=operation, result=match.span(of_operation)),
            Step(start=middle, stop=match.end(), kind=result, result=match.span(of_result)),
        ]

    def _operation(self, a: int, sign: str, b: int) -> tuple[StepKind, str]:
        right = self.problem.totals[self.due]
        if a not in (self.value, right):
            return "slip", "a"
        if self.due == len(self.problem.terms):
            return "slip", "sign"
        if sign != self.problem.operators[self.due]:
            misled = sign == self.suggested[self.due] and b == self.problem.terms[self.due][1]
            return ("misconception" if misled else "slip"), "sign"
        return ("sound" if a == right else "inherited"), "sign"

    def _result(self, match: re.Match[str], operation: StepKind) -> tuple[StepKind, str]:
        a, sign, b, c = int(match["a"]), match["sign"], int(match["b"]), int(match["c"])
        if self.due < len(self.problem.terms) and b != self.problem.terms[self.due][1]:
            return "slip", "b"
        if (wrong := wrong_result(a, sign, b, c)) is not None:
            return wrong, "c"
        return ("sound" if operation == "sound" else "inherited"), "c"

    def advance(self, sign: str, b: int) -> int:
        """The number of terms that are done; a line with the due number does the due term, whatever its operation."""
        if self.due < len(self.problem.terms) and b == self.problem.terms[self.due][1]:
            return self.due + 1
        return super().advance(sign, b)
