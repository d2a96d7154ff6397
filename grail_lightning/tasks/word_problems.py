"""Generated word problems of a few steps, with worked solutions.

A problem and its solution::

    Anna has 4 apples. Anna buys 3 more apples. Anna gives 2 apples to Ben. How many apples does Anna have now?

    4 + 3 = 7
    7 - 2 = 5
    #### 5

With comparisons, the solution is in sentences, and half of the comparisons have a word that suggests the wrong
operation::

    Anna has 8 coins. Anna finds 5 coins. Then Anna has 4 fewer coins than Ben. How many coins does Ben have now?

    Anna has 8+5=13 coins.
    Ben has 13+4=17 coins.
    #### 17
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from grail_lightning.tasks.problems import Problem, Split, calculate, split_of, split_rng, worked_lines

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Lena", "Tom")
ITEMS = ("apples", "books", "cards", "coins", "cookies", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
EVENTS = {
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
COMPARISONS = {
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
OTHER_SIGN = {"+": "-", "-": "+"}
MOST_TRIES = 200


@dataclass(frozen=True)
class WordProblem:
    """A word problem and the chain of computations that solves it.

    Attributes:
        sentences: The problem; its last sentence is the question.
        items: What is counted.
        owners: Whose number is known at the beginning and after each step.
        chain: The numbers and operations.
        suggested: The operators that the words of the steps suggest, one character each.
        in_words: Whether the lines of a solution are sentences.
    """

    sentences: tuple[str, ...]
    items: str
    owners: tuple[str, ...]
    chain: Problem
    suggested: str
    in_words: bool

    @property
    def text(self) -> str:
        """The problem."""
        return " ".join(self.sentences)

    def line(self, step: int, a: int, sign: str, b: int, result: int) -> str:
        """The line of a step of a solution, with any numbers."""
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
    """A solution with random mistakes, which continues consistently from a wrong result.

    Args:
        problem: The problem to solve.
        rng: The random numbers that decide where the mistakes are.
        slip_rate: The probability that a line gets a random wrong result, off by at most nine.
        misconception_rate: The probability that a line with a carry forgets it, and that a line takes the operation
            that the words suggest where this is the wrong one.
        filler_rate: The probability of a line without content before a line.

    Returns:
        A line for each step, then the answer behind ``####``.
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
    """

    min_steps: int = 1
    max_steps: int = 3
    largest: int = 20
    operators: str = "+-"
    comparisons: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_steps <= self.max_steps <= 10:
            raise ValueError(
                "`min_steps` and `max_steps` must satisfy 1 <= min_steps <= max_steps <= 10, "
                f"but got {self.min_steps} and {self.max_steps}."
            )
        if not 3 <= self.largest < 10**6:
            raise ValueError(f"`largest` must lie between 3 and 999,999, but got {self.largest}.")
        if not self.operators or len(set(self.operators)) < len(self.operators) or set(self.operators) - set(EVENTS):
            raise ValueError(f"`operators` must be some of +, - and *, once each, but got {self.operators!r}.")

    def sample(self, num_problems: int, split: Split, seed: int = 0) -> list[dict[str, str | int]]:
        """Distinct problems of one split, always the same for the same arguments.

        Args:
            num_problems: The number of problems.
            split: The split: train, validation or test.
            seed: The seed of the choice.

        Returns:
            Rows with the columns `problem`, `solution`, `answer` and `steps`, the number of computations; with
            comparisons also `suggested`, the operators that the words of the steps suggest.

        Raises:
            ValueError: If the split is unknown, or so many distinct problems are hardly to be found.
        """
        return [problem.row() for problem in self.draw(num_problems, split, seed)]

    def draw(self, num_problems: int, split: Split, seed: int = 0) -> list[WordProblem]:
        """The problems of `sample`."""
        rng = split_rng(split, seed, "words-")
        problems: dict[str, WordProblem] = {}
        in_vain = 0
        while len(problems) < num_problems and in_vain < MOST_TRIES * (len(problems) + 100):
            problem = self._draw(rng)
            new = split_of(problem.text) == split and problem.text not in problems
            if new:
                problems[problem.text] = problem
            in_vain = 0 if new else in_vain + 1
        if len(problems) < num_problems:
            raise ValueError(
                f"The {split} split hardly has {num_problems} different problems: only {len(problems)} were found. Ask "
                "for fewer, or raise `largest` or `max_steps`."
            )
        return list(problems.values())

    def _draw(self, rng: random.Random) -> WordProblem:
        name, other = rng.sample(NAMES, 2)
        items, total = rng.choice(ITEMS), rng.randint(2, self.largest)
        steps = rng.randint(self.min_steps, self.max_steps)
        sentences, owners, operands, signs, suggested = [f"{name} has {total} {items}."], [name], [total], "", ""
        for _ in range(steps):
            usable = [sign for sign in self.operators if sign != "-" or total > 2] or ["+"]
            sign = rng.choice(usable)
            most = {"+": self.largest, "-": min(total - 1, self.largest), "*": 3}[sign]
            number = rng.randint(2, most)
            compared = self.comparisons and rng.random() < 0.5
            event = rng.choice((COMPARISONS if compared else EVENTS)[sign])
            sentences.append(event.format(name=name, other=other, items=items, number=number))
            misleading = compared and event != COMPARISONS[sign][0]
            suggested += OTHER_SIGN[sign] if misleading else sign
            if compared:
                name, other = other, rng.choice([one for one in NAMES if one not in (*owners, other)])
            owners.append(name)
            operands.append(number)
            signs += sign
            total = calculate(total, sign, number)
        sentences.append(f"How many {items} does {name} have now?")
        chain = Problem(tuple(operands), signs)
        return WordProblem(tuple(sentences), items, tuple(owners), chain, suggested, self.comparisons)
