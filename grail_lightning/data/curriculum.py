"""A curriculum: training begins with easy problems and ends with all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from grail_lightning.data.sources import Table
from grail_lightning.runtime.seeds import derive_seed


@dataclass(frozen=True)
class Curriculum:
    """From easy to hard, by a column of the training data.

    During the first `batches` batches, prompts are drawn from the easiest share of each dataset. The share grows
    linearly from `start` to all rows; then ordinary epochs begin. No prompt is drawn again before all of the share have
    been drawn.

    Args:
        column: The column of the difficulty, a number; a larger one is harder.
        batches: The number of batches of rollouts until all problems are drawn from.
        start: The share of the rows at the beginning, above 0 and at most 1.
    """

    column: str
    batches: int
    start: float = 0.2

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ValueError(f"`curriculum.batches` must be at least 1, but got {self.batches}.")
        if not 0 < self.start <= 1:
            raise ValueError(f"`curriculum.start` must be above 0 and at most 1, but got {self.start}.")


def read_difficulty(column: str, table: Table, indices: Sequence[int]) -> list[float]:
    """The difficulty of the selected rows."""
    selected = set(indices)
    difficulty = {}
    for index, row in enumerate(table.columns([column])):
        if index not in selected:
            continue
        value = row.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"{table.place(index)}: `{column}` must be a finite number, the difficulty that `curriculum.column` "
                f"names, but got {value!r}. The columns are: {', '.join(map(str, table.rows[index]))}."
            )
        difficulty[index] = float(value)
    return [difficulty[index] for index in indices]


def easy_first(
    difficulties: Sequence[Sequence[float]], weights: Sequence[float], draws: int, start: float, seed: int
) -> list[tuple[int, int]]:
    """The prompts of a curriculum, as (set, index) pairs: a pure function of its arguments.

    Args:
        difficulties: The difficulty of each prompt of each set.
        weights: The share of the draws of each set, relative to the others.
        draws: The number of prompts.
        start: The share of each set from which the first prompts are drawn. It grows linearly to 1.
        seed: The seed of the order.
    """
    rng = random.Random(derive_seed(seed, "curriculum"))  # noqa: S311 - an order, not a secret
    sets = [_GrowingSet(difficulty, rng) for difficulty in difficulties]
    order = []
    for slot in range(draws):
        (which,) = rng.choices(range(len(sets)), weights)
        order.append((which, sets[which].draw(start + (1 - start) * slot / draws)))
    return order


class _GrowingSet:
    """Draws without repetition from the easiest share of a set."""

    def __init__(self, difficulty: Sequence[float], rng: random.Random) -> None:
        self.rng = rng
        # Prompts of equal difficulty are in random order.
        shuffled = rng.sample(range(len(difficulty)), len(difficulty))
        self.ranked = sorted(shuffled, key=difficulty.__getitem__)
        self.left: list[int] = []
        self.known = 0

    def draw(self, share: float) -> int:
        """A prompt of the easiest `share` that has not been drawn, as long as there is one."""
        reach = max(1, math.ceil(share * len(self.ranked)))
        self.left += self.ranked[self.known : reach]
        self.known = max(self.known, reach)
        if not self.left:
            self.left = self.ranked[:reach]
        return self.left.pop(self.rng.randrange(len(self.left)))
