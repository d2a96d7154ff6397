"""Make the packaged policy `grail_lightning/worlds/assets/code`: a tiny model that errs when it writes programs.

A Qwen3 of 0.9 M parameters learns from demonstrations whose statements hold slips (another operator, a number that is
off by one, another name) and misconceptions, which the words suggest: `<` for "at most", a product that starts at 0.
See make_arithmetic_policy.py for why.

    python scripts/make_code_policy.py

The same seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from policy_making import ASSETS, Training, World, make, make_tokenizer, parse_arguments
from policy_measures import Page, write_card

from grail_lightning import CodeTask
from grail_lightning.worlds.code.functions import FunctionProblem, FunctionSpace, function_demonstration

SPACE = FunctionSpace()
# A word, an operator or a digit owns the blank before it, an operator also the one behind, and a line break the
# indentation. A word is thus the same token in a specification and in a program.
PIECES = r"```\p{L}*|\n *| ?\.?\p{L}+| ?[<>=!+\-*/%]+ ?| ?\p{N}|[^\S\n]+|[^\s\p{L}\p{N}<>=!+\-*/%]"
VOCAB_SIZE = 480


@dataclass(frozen=True, kw_only=True)
class CodeRecipe(Training):
    """How a policy that writes programs is made; the rates are those of `function_demonstration`."""

    num_batches: int = 500
    batch_size: int = 48
    slip_rate: float = 0.05
    misconception_rate: float = 0.4


def train(recipe: CodeRecipe) -> list[FunctionProblem]:
    """Problems; those of a batch are about equally long, so that little is padded."""
    rng, size = random.Random(recipe.seed), recipe.batch_size
    problems = SPACE.draw(recipe.num_batches * size, "train", recipe.seed)
    ordered = []
    for start in range(0, len(problems), 10 * size):
        some = sorted(problems[start : start + 10 * size], key=lambda problem: len(problem.text + problem.program))
        batches = [some[k : k + size] for k in range(0, len(some), size)]
        ordered += [problem for batch in rng.sample(batches, len(batches)) for problem in batch]
    return ordered


def demonstrate(problem: FunctionProblem, rng: random.Random, recipe: CodeRecipe) -> str:
    """A program with mistakes."""
    return function_demonstration(problem, rng, recipe.slip_rate, recipe.misconception_rate)


def main() -> None:
    """Make, measure and save."""
    options, recipe = parse_arguments(__doc__, CodeRecipe(), ASSETS / "code")
    task = CodeTask(instruction="")
    world = World(prompt=lambda problem: task.prompt(problem.row()), train=train, demonstrate=demonstrate)
    texts = [
        text
        for problem in SPACE.draw(400, "train")
        for text in (problem.text, function_demonstration(problem, random.Random(0)))
    ]
    minutes = make(world, make_tokenizer(texts, VOCAB_SIZE, PIECES), recipe, options)
    example = SPACE.draw(1, "test")[0]
    page = Page(
        output=options.output,
        recipe=recipe,
        script="make_code_policy.py",
        what="A Qwen3 of {:,} parameters with a byte-level tokenizer of its own, which writes short functions and\n"
        "errs on purpose.",
        example=(example.text, function_demonstration(example, random.Random(0))),
        errors="Slips are another operator, a number that is off by one, another name, or a colon that is missing. "
        'Misconceptions\nare what the words suggest: `<` for "at most", a product that starts at 0, a sum where one '
        "counts.",
    )
    write_card(page, {"4 to 8 statements": [world.prompt(p) for p in SPACE.draw(128, "validation")]}, 80, minutes)


if __name__ == "__main__":
    main()
