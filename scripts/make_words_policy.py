"""Make the packaged policy `grail_lightning/worlds/assets/words`: a tiny language model that errs on word problems.

A Qwen3 of 0.9 M parameters learns from demonstrations that hold slips (random wrong results) and misconceptions: the
carry is forgotten, and the operation is taken that the words suggest ("Then Anna has 4 fewer coins than Ben") although
it is the wrong one. See make_arithmetic_policy.py for why.

    python scripts/make_words_policy.py

The same seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import random

import torch
from policy_making import ASSETS, Recipe, World, make, make_tokenizer, parse_arguments
from policy_measures import Page, write_card

from grail_lightning import WordProblemTask
from grail_lightning.worlds.sums.task import FILLERS
from grail_lightning.worlds.words.task import WordProblem, WordProblemSpace, word_demonstration

SPACE = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
VOCAB_SIZE = 640


def demonstrate(problem: WordProblem, rng: random.Random, recipe: Recipe) -> str:
    """A solution with mistakes."""
    return word_demonstration(problem, rng, recipe.slip_rate, recipe.misconception_rate, recipe.filler_rate)


def main() -> None:
    """Make, measure and save."""
    defaults = Recipe(num_batches=600, slip_rate=0.06, misconception_rate=0.4)
    options, recipe = parse_arguments(__doc__, defaults, ASSETS / "words")
    task = WordProblemTask()
    world = World(
        prompt=lambda problem: task.prompt(problem.row()),
        train=lambda recipe: SPACE.draw(recipe.num_batches * recipe.batch_size, "train", recipe.seed),
        demonstrate=demonstrate,
    )
    rows = [problem.row() for problem in SPACE.draw(300, "train")]
    tokenizer = make_tokenizer([*(str(row[c]) for row in rows for c in ("problem", "solution")), *FILLERS], VOCAB_SIZE)
    minutes = make(world, tokenizer, recipe, options, dtype=torch.float32)
    example = SPACE.draw(1, "test")[0].row()
    page = Page(
        output=options.output,
        recipe=recipe,
        script="make_words_policy.py",
        what="A Qwen3 of {:,} parameters with a byte-level tokenizer of its own, which solves problems line by line\n"
        "and errs on purpose.",
        example=(example["problem"], example["solution"]),
        errors="Slips are random wrong results. Misconceptions forget the carry (`7+5=2`) or take the operation that "
        "the words suggest\nwhere it is the wrong one. Inherited steps go on from a wrong result.",
    )
    write_card(page, {"2 or 3 steps": [world.prompt(p) for p in SPACE.draw(512, "validation")]}, 64, minutes)


if __name__ == "__main__":
    main()
