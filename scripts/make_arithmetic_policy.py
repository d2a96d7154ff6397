r"""Make the packaged policy `grail_lightning/worlds/assets/arithmetic`: a tiny language model that errs on purpose.

A Qwen3 of 0.8 M parameters learns from demonstrations that hold two kinds of mistakes: slips (rare and random, so the
flawed token is unlikely) and misconceptions (the carry is forgotten in about half of the cases, so the flawed token is
likely). It then knows format and arithmetic but errs at random, which is what reinforcement learning needs to find
something. A model made on clean demonstrations errs deterministically and learns nothing from its own samples.

    python scripts/make_arithmetic_policy.py

The same seed, thread count and library versions give the same weights. Longer chains, which begin with its weights:

    python scripts/make_arithmetic_policy.py --terms 5 10 --start arithmetic \
        --output grail_lightning/worlds/assets/chains …

The READMEs of `grail_lightning/worlds/assets/chains` and `long_chains` have all options.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch
from policy_making import ASSETS, Recipe, World, make, make_tokenizer, parse_arguments
from policy_measures import Page, write_card

from grail_lightning import ArithmeticTask, resolve_policy
from grail_lightning.worlds.sums.task import FILLERS, Problem, ProblemSpace, demonstration

EXAMPLE = "7+5-3+8-9"
# Tokens of a response of `n` terms: the quickstart's limit for five, with room for totals of more digits.
TOKENS_A_TERM = 11


@dataclass(frozen=True, kw_only=True)
class ChainRecipe(Recipe):
    """How a policy of chains is made.

    The rates hold for chains of five terms. For longer ones, those of slips and misconceptions fall with the number of
    lines, so that about as many responses are right.

    Attributes:
        terms: The smallest and the largest number of terms. A batch has one number; longer ones come in by and by.
        start: A packaged policy or a folder, whose weights are the beginning; random ones if empty.
    """

    terms: tuple[int, int] = (5, 5)
    start: str = ""


def train(recipe: ChainRecipe) -> list[Problem]:
    """Problems of the recipe's numbers of terms; those of a batch have one number."""
    rng, (fewest, most), size = random.Random(recipe.seed), recipe.terms, recipe.batch_size
    # The longest chains come in after two fifths of the batches.
    reached = [
        min(most, fewest + int((most - fewest) * (0.2 + 2 * k / recipe.num_batches))) for k in range(recipe.num_batches)
    ]
    lengths = [rng.randint(fewest, longest) for longest in reached]
    drawn = {
        n: iter(ProblemSpace(n, n).draw(batches * size, "train", recipe.seed))
        for n, batches in Counter(lengths).items()
    }
    return [next(drawn[n]) for n in lengths for _ in range(size)]


def demonstrate(problem: Problem, rng: random.Random, recipe: ChainRecipe) -> str:
    """A solution with mistakes, at rates that fall with the number of lines."""
    share = 4 / len(problem.terms)
    return demonstration(problem, rng, share * recipe.slip_rate, share * recipe.misconception_rate, recipe.filler_rate)


def main() -> None:
    """Make, measure and save."""
    options, recipe = parse_arguments(__doc__, ChainRecipe(), ASSETS / "arithmetic")
    task, (fewest, most) = ArithmeticTask(), recipe.terms
    world = World(
        prompt=lambda problem: task.prompt({"problem": problem.expression}), train=train, demonstrate=demonstrate
    )
    tokenizer = make_tokenizer(["Compute ", r"\boxed", *FILLERS])
    start = resolve_policy(recipe.start) if recipe.start else ""
    minutes = make(world, tokenizer, recipe, options, start=start, dtype=torch.float32)
    example = Problem.parse(EXAMPLE) if fewest <= 5 else ProblemSpace(fewest, fewest).draw(1, "validation")[0]
    page = Page(
        output=options.output,
        recipe=recipe,
        script="make_arithmetic_policy.py",
        what="A Qwen3 of {:,} parameters with a byte-level tokenizer of its own, which solves problems line by line\n"
        "and errs on purpose.",
        example=(f"Compute {example.expression}.", demonstration(example, random.Random(0), 0, 0, 0)),
        errors="Slips are random wrong results. Misconceptions forget the carry: `7+5=2`. Inherited steps go on from a "
        "wrong result.",
    )
    counts, number = sorted({fewest, most} | {n for n in (5, 10, 20) if fewest < n < most}), 512 if most == 5 else 128
    problems = {f"{n} terms": ProblemSpace(n, n).draw(number, "validation") for n in counts}
    held_out = {name: [world.prompt(problem) for problem in drawn] for name, drawn in problems.items()}
    write_card(page, held_out, max(64, TOKENS_A_TERM * most), minutes)


if __name__ == "__main__":
    main()
