"""Generated word problems of a few steps, with worked solutions.

A problem and its solution::

    Anna has 4 apples. Anna buys 3 more apples. Anna gives 2 apples to Ben. How many apples does Anna have now?

    4 + 3 = 7
    7 - 2 = 5
    #### 5
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from grail_lightning.tasks.problems import SPLITS, Split, split_of

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
MOST_TRIES = 200


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
    """

    min_steps: int = 1
    max_steps: int = 3
    largest: int = 20
    operators: str = "+-"

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
            Rows with the columns `problem`, `solution`, `answer` and `steps`, the number of computations.

        Raises:
            ValueError: If the split is unknown, or so many distinct problems are hardly to be found.
        """
        if split not in SPLITS:
            raise ValueError(f"`split` must be one of {', '.join(SPLITS)}, but got {split!r}.")
        rng = random.Random(f"words-{split}-{seed}")  # noqa: S311 - problems, not secrets
        rows: dict[str, dict[str, str | int]] = {}
        in_vain = 0
        while len(rows) < num_problems and in_vain < MOST_TRIES * (len(rows) + 100):
            row = self._draw(rng)
            new = split_of(str(row["problem"])) == split and str(row["problem"]) not in rows
            if new:
                rows[str(row["problem"])] = row
            in_vain = 0 if new else in_vain + 1
        if len(rows) < num_problems:
            raise ValueError(
                f"The {split} split hardly has {num_problems} different problems: only {len(rows)} were found. Ask "
                "for fewer, or raise `largest` or `max_steps`."
            )
        return list(rows.values())

    def _draw(self, rng: random.Random) -> dict[str, str | int]:
        name, other = rng.sample(NAMES, 2)
        items, total = rng.choice(ITEMS), rng.randint(2, self.largest)
        steps = rng.randint(self.min_steps, self.max_steps)
        sentences, lines = [f"{name} has {total} {items}."], []
        for _ in range(steps):
            usable = [sign for sign in self.operators if sign != "-" or total > 2] or ["+"]
            sign = rng.choice(usable)
            most = {"+": self.largest, "-": min(total - 1, self.largest), "*": 3}[sign]
            number = rng.randint(2, most)
            result = {"+": total + number, "-": total - number, "*": total * number}[sign]
            event = rng.choice(EVENTS[sign])
            sentences.append(event.format(name=name, other=other, items=items, number=number))
            lines.append(f"{total} {sign} {number} = {result}")
            total = result
        sentences.append(f"How many {items} does {name} have now?")
        solution = "\n".join([*lines, f"#### {total}"])
        return {"problem": " ".join(sentences), "solution": solution, "answer": str(total), "steps": steps}
