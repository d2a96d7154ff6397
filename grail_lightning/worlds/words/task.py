r"""Word problems of a few steps: problems with worked solutions, and the task with its labels.

The labels that `WordProblemTask.label_steps` gives to a response to ``Anna has 8 coins. Anna finds 5 coins. Then Anna
has 4 fewer coins than Ben. How many coins does Ben have now?``. Each line has two steps, the operation and the result::

    Then                      filler          no digit and no equals sign
    Anna has 8+               sound
               5=12 coins.    slip            12 instead of 13
    Ben has 12-               misconception   "fewer" suggests the wrong operation
               4=8 coins.     inherited       right in itself, but computed with a wrong operation
    #### 8                    (no step)       copies the last result

Without comparisons of two persons, the lines of a worked solution are equations, such as ``8 + 5 = 13``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from grail_lightning.answers.find import Marker
from grail_lightning.core.records.task import Prompt, Step, StepKind
from grail_lightning.core.tasks.answered import MathTask
from grail_lightning.core.tasks.rewards import Rewards
from grail_lightning.worlds.splits import ProblemSplit, distinct, split_rng
from grail_lightning.worlds.sums.task import Chain, Problem, calculate, equation, worked_lines

_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Lena", "Tom")
_ITEMS = ("apples", "books", "cards", "coins", "cookies", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
_EVENTS = {
    "+": (
        "{name} buys {number} more {items}.",
        "{name} finds {number} {items}.",
        "{other} gives {number} {items} to {name}.",
        "{name} gets {number} {items} as a present.",
    ),
    "-": (
        "{name} gives {number} {items} to {other}.",
        "{name} loses {number} {items}.",
        "{name} sells {number} {items}.",
    ),
    "*": ("Then the number of {items} that {name} has is multiplied by {number}.",),
}
# The number of the known person stands in the first of two sentences as their subject, in the second as what it is
# compared with. The word of the second one suggests the other operation.
_COMPARISONS = {
    "+": (
        "{other} has {number} more {items} than {name}.",
        "Then {name} has {number} fewer {items} than {other}.",
    ),
    "-": (
        "{other} has {number} fewer {items} than {name}.",
        "Then {name} has {number} more {items} than {other}.",
    ),
    "*": ("{other} has {number} times as many {items} as {name}.",),
}
_OTHER_SIGN = {"+": "-", "-": "+"}


@dataclass(frozen=True)
class WordProblem:
    """A word problem and the chain of computations that solves it."""

    text: str
    items: str  # What is counted.
    owners: tuple[str, ...]  # Whose number is known at the beginning and after each step.
    chain: Problem
    suggested: str  # The operator that the words of each step suggest.
    in_words: bool  # Whether the lines of a solution are sentences.
    with_calls: bool | Literal["python"] = False  # Whether they are calls, of a calculator or of Python.

    def line(self, step: int, a: int, sign: str, b: int, result: int) -> str:
        """The line of a step of a solution, with any numbers."""
        if self.with_calls == "python":
            return f"<run>print({a} {sign} {b})</run>\n<result>{result}</result>"
        if self.with_calls:
            return f"<calculator>{a} {sign} {b}</calculator>\n<result>{result}</result>"
        if not self.in_words:
            return f"{a} {sign} {b} = {result}"
        return f"{self.owners[step + 1]} has {a}{sign}{b}={result} {self.items}."

    def row(self) -> dict[str, str | int]:
        """The columns of the problem; see `WordProblemSpace.sample`."""
        row: dict[str, str | int] = {
            "problem": self.text,
            "solution": word_demonstration(self, random.Random(0)),  # noqa: S311 - draws nothing
            "answer": str(self.chain.answer),
            "steps": len(self.chain.terms),
        }
        return row | {"suggested": self.suggested} if self.in_words else row


def word_demonstration(
    problem: WordProblem,
    rng: random.Random,
    slip_rate: float = 0.0,
    misconception_rate: float = 0.0,
    filler_rate: float = 0.0,
) -> str:
    """A line for each step, with random mistakes as in `demonstration`, then the answer behind ``####``.

    A misconception is also the operation that the words suggest, where this is the wrong one.
    """
    rates = slip_rate, misconception_rate, filler_rate
    lines, total = worked_lines(problem.chain, problem.suggested, problem.line, rng, rates)
    return "\n".join([*lines, f"#### {total}"])


@dataclass(frozen=True)
class WordProblemSpace:
    """The set of all word problems of a kind, from which seeded draws are made.

    Every problem belongs permanently to one split, by a hash of its text: 80 % train, 10 % validation, 10 % test. Draws
    for different splits are therefore disjoint, whatever their seeds, sizes and options.

    Attributes:
        min_steps: The smallest number of computations in a problem.
        max_steps: The largest number of computations in a problem.
        largest: The largest number at the beginning, and the largest that is added or taken away. Factors are 2 and 3.
        operators: The operations that occur, out of ``+``, ``-`` and ``*``.
        comparisons: Whether about half of the steps compare two persons. Half of these comparisons have a word that
            suggests the wrong operation: "Then Anna has 4 fewer coins than Ben" makes Ben's number larger. The
            solution is then in sentences.
        calls: Whether the lines of a solution are calls of a calculator, with its results, in plain tags: worked
            examples for `EnvironmentTask` with the environment `Calculator`; or programs, with python, for `Python`.
    """

    min_steps: int = 1
    max_steps: int = 3
    largest: int = 20
    operators: str = "+-"
    comparisons: bool = False
    calls: bool | Literal["python"] = False

    def __post_init__(self) -> None:
        numbers = 1 <= self.min_steps <= self.max_steps <= 10 and 3 <= self.largest < 10**6
        signs = set(self.operators)
        if not numbers or not signs or len(signs) < len(self.operators) or not signs <= set(_EVENTS):
            raise ValueError(
                "`problems` must have 1 <= min_steps <= max_steps <= 10, 3 <= largest < 10^6, and as operators some of "
                f"+, - and *, once each, but got {self}."
            )

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[dict[str, str | int]]:
        """Distinct problems of one split, always the same for the same arguments, as rows.

        Their columns are `problem`, `solution`, `answer` and `steps`, the number of computations; with comparisons also
        `suggested`, the operators that the words of the steps suggest.
        """
        return [problem.row() for problem in self.draw(num_problems, split, seed)]

    def draw(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[WordProblem]:
        """The problems of `sample`."""
        rng = split_rng(split, seed, "words-")
        return distinct(
            lambda: self._draw(rng), lambda problem: problem.text, num_problems, split, "`largest` or `max_steps`"
        )

    def _draw(self, rng: random.Random) -> WordProblem:
        name, other = rng.sample(_NAMES, 2)
        items, total = rng.choice(_ITEMS), rng.randint(2, self.largest)
        steps = rng.randint(self.min_steps, self.max_steps)
        sentences, owners, operands, signs, suggested = [f"{name} has {total} {items}."], [name], [total], "", ""
        for _ in range(steps):
            usable = [sign for sign in self.operators if sign != "-" or total > 2] or ["+"]
            sign = rng.choice(usable)
            most = {"+": self.largest, "-": min(total - 1, self.largest), "*": 3}[sign]
            number = rng.randint(2, most)
            compared = self.comparisons and rng.random() < 0.5
            event = rng.choice((_COMPARISONS if compared else _EVENTS)[sign])
            sentences.append(event.format(name=name, other=other, items=items, number=number))
            misleading = compared and event != _COMPARISONS[sign][0]
            suggested += _OTHER_SIGN[sign] if misleading else sign
            if compared:
                name, other = other, rng.choice([person for person in _NAMES if person not in (*owners, other)])
            owners.append(name)
            operands.append(number)
            signs += sign
            total = calculate(total, sign, number)
        sentences.append(f"How many {items} does {name} have now?")
        chain = Problem(tuple(operands), signs)
        return WordProblem(" ".join(sentences), items, tuple(owners), chain, suggested, self.comparisons, self.calls)


class WordProblemTask(MathTask):
    """Word problems with a worked solution, whose answer follows ``####`` and whose steps are labelled.

    Args:
        instruction: The text that is appended to the problem, including its leading space.
        system_prompt: The text of a system turn before the user turn; none by default.
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.
    """

    def __init__(self, instruction: str = "", system_prompt: str | None = None, rewards: Rewards | None = None) -> None:
        super().__init__(instruction, system_prompt, rewards, Marker(evaluated=True))

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """Label every step of any response, well-formed or not, in time linear in its length.

        The problem's chain of computations is read from the row's column `solution`, and the operators that its words
        suggest from `suggested` (as in the solution, if the column is missing). A line of the response with one
        equation ``a+b=c``, among any words, has two steps.

        The operation, up to the operator, is a misconception if it is the one that the words suggest, which is wrong,
        with the problem's number; and a slip if it is another wrong one, or ``a`` is miscopied. The result, behind the
        operator, is inherited behind a wrong operation, a misconception if it is that of a forgotten carry, and a slip
        if it is wrong in another way or ``b`` is not the problem's number. Other lines, skipped and repeated steps and
        answers are as in `ArithmeticTask`.

        `Step.result` is the range of the operator or of ``c``, or of the number that is miscopied.

        If the solution is no chain of computations, there are no labels.
        """
        solution = prompt.columns.get("solution")
        chain = None if solution is None else _chain(str(solution))
        if chain is None:
            return None
        suggested = str(prompt.columns.get("suggested") or "")
        return _WordChain(chain, suggested if len(suggested) == len(chain.terms) else "").label(
            text, self.answer_spans(text)
        )


@lru_cache(maxsize=4096)
def _chain(solution: str) -> Problem | None:
    """The chain of a worked solution: each line goes on from the result of the line before."""
    matches = [match for line in solution.split("\n") if (match := _WordChain.pattern.fullmatch(line))]
    if not matches:
        return None
    operands = [int(matches[0]["a"]), *(int(match["b"]) for match in matches)]
    problem = Problem(tuple(operands), "".join(match["sign"] for match in matches))
    stated = [operands[0], *(int(match["c"]) for match in matches)]
    begun = [int(match["a"]) for match in matches]
    return problem if list(problem.totals) == stated and begun == stated[:-1] else None


class _WordChain(Chain):
    """Compares a response with its problem, in two steps a line."""

    pattern: ClassVar[re.Pattern[str]] = equation("+-*")

    def steps(self, match: re.Match[str], operation: tuple[StepKind, str], result: tuple[StepKind, str]) -> list[Step]:
        """The operation and the result of a line ``a sign b = c``."""
        middle = match.end("sign")
        return [
            Step(start=match.start(), stop=middle, kind=operation[0], result=match.span(operation[1])),
            Step(start=middle, stop=match.end(), kind=result[0], result=match.span(result[1])),
        ]

    def advance(self, sign: str, b: int) -> int:
        """The number of terms that are done; a line with the due number does the due term, whatever its operation."""
        if self.due < len(self.problem.terms) and b == self.problem.terms[self.due][1]:
            return self.due + 1
        return super().advance(sign, b)
