"""Make the packaged policy `grail_lightning/worlds/assets/numbers`: a tiny language model of sums and comparisons.

A Qwen3 of 0.8 M parameters learns from demonstrations of sums and differences of two to six numbers from 1 to 20, and
of comparisons of such sums and of plain numbers. They hold slips and misconceptions: the carry is forgotten, and
numbers are compared by their first characters. See make_arithmetic_policy.py for why.

    python scripts/make_numbers_policy.py

The same seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import torch
from policy_making import ASSETS, Recipe, World, make, make_tokenizer, parse_arguments
from policy_measures import Page, write_card

from grail_lightning import MathTask, Prompt
from grail_lightning.answers import Boxed
from grail_lightning.worlds.splits import ProblemSplit, distinct, split_of, split_rng
from grail_lightning.worlds.sums.task import FILLERS, Problem, worked_equations

LARGEST = 20
MOST_TERMS = 6
HELD_OUT = 256
POOL = 16
"""Batches whose questions are sorted together."""
RATES = ("slip_rate", "misconception_rate", "filler_rate")


@dataclass(frozen=True)
class Question:
    """A sum or difference, if it has one part, or which of its parts is the largest or the smallest."""

    text: str
    parts: tuple[Problem, ...]  # One number each, or a sum.
    largest: bool = True

    @property
    def answer(self) -> int:
        """The value of the sum, or of the largest or smallest part."""
        return (max if self.largest else min)(part.answer for part in self.parts)


def numbers(rng: random.Random, terms: int) -> Problem:
    """A sum or difference of so many numbers, or a number alone."""
    return Problem(
        tuple(rng.randint(1, LARGEST) for _ in range(terms)), "".join(rng.choice("+-") for _ in range(terms - 1))
    )


def a_sum(rng: random.Random) -> Question:
    """Two to six terms."""
    part = numbers(rng, rng.randint(2, MOST_TERMS))
    return Question(rng.choice(["Compute {}.", "What is {}?"]).format(part.expression), (part,))


def a_comparison(rng: random.Random) -> Question:
    """Of two sums of up to three terms with other values, of which one may be a number."""
    while True:
        parts = numbers(rng, rng.randint(1, 3)), numbers(rng, rng.randint(2, 3))
        if parts[0].answer != parts[1].answer:
            break
    first, second = parts = parts if rng.random() < 0.5 else parts[::-1]
    word = rng.choice(["larger", "smaller"])
    return Question(f"Which is {word}, {first.expression} or {second.expression}?", parts, word == "larger")


def an_extreme(rng: random.Random) -> Question:
    """The largest or the smallest of three to six different numbers."""
    *others, last = drawn = rng.sample(range(1, LARGEST + 1), rng.randint(3, MOST_TERMS))
    word = rng.choice(["largest", "smallest"])
    text = f"What is the {word} of {', '.join(map(str, others))} and {last}?"
    return Question(text, tuple(Problem((number,), "") for number in drawn), word == "largest")


KINDS = {"2 to 6 terms": a_sum, "comparison of sums": a_comparison, "largest, smallest": an_extreme}
SHARES = (0.6, 0.3, 0.1)
"""Of each kind among the demonstrations."""


def drawn(split: ProblemSplit, seed: int) -> Iterator[Question]:
    """Questions of all kinds, of which some come again."""
    rng = split_rng(split, seed, "numbers")
    while True:
        question = rng.choices(list(KINDS.values()), SHARES)[0](rng)
        if split_of(question.text) == split:
            yield question


def held_out(kind: str) -> list[Question]:
    """Different questions of a kind that no demonstration has."""
    rng = split_rng("validation", 0, kind)
    return distinct(lambda: KINDS[kind](rng), lambda question: question.text, HELD_OUT, "validation", "LARGEST")


def train(recipe: Recipe) -> list[Question]:
    """The questions of all demonstrations; those of a batch have about as many lines, so that little is padded."""
    questions, rng, size = drawn("train", recipe.seed), random.Random(recipe.seed), recipe.batch_size
    found = list[Question]()
    while len(found) < recipe.num_batches * size:
        some = sorted(islice(questions, POOL * size), key=lines_of)
        batches = [some[k : k + size] for k in range(0, len(some), size)]
        rng.shuffle(batches)
        found += chain.from_iterable(batches)
    return found


def lines_of(question: Question) -> int:
    """Steps and comparisons of a solution."""
    return sum(len(part.terms) for part in question.parts) + len(question.parts) - 1


def demonstrate(question: Question, rng: random.Random, recipe: Recipe) -> str:
    """A solution with mistakes, at rates that fall with the number of lines."""
    share = min(4 / lines_of(question), 1.5)
    slip, misconception = share * recipe.slip_rate, share * recipe.misconception_rate
    lines, values = list[str](), list[int]()
    for part in question.parts:
        worked, total = worked_equations(part, rng, (slip, misconception, recipe.filler_rate))
        lines += worked
        values.append(total)
    best = values[0]
    for value in values[1:]:
        sign = compared(best, value, rng, slip, misconception)
        lines.append(f"{best}{sign}{value}")
        if sign == ("<" if question.largest else ">"):
            best = value
    return "\n".join([*lines, f"\\boxed{{{best}}}"])


def compared(a: int, b: int, rng: random.Random, slip_rate: float, misconception_rate: float) -> str:
    """The sign between two numbers: by their first characters as a misconception, and now and then any other one."""
    right, tempting = sign_of(a, b), sign_of(str(a), str(b))
    if tempting != right and rng.random() < misconception_rate:
        return tempting
    return rng.choice([sign for sign in "<>" if sign != right]) if rng.random() < slip_rate else right


def sign_of(a: int | str, b: int | str) -> str:
    """The sign between two numbers, or two texts."""
    return "=" if a == b else "<" if a < b else ">"  # type: ignore[operator]


def main() -> None:
    """Make, measure and save."""
    defaults = Recipe(num_batches=2000, slip_rate=0.06, misconception_rate=0.35)
    options, recipe = parse_arguments(__doc__, defaults, ASSETS / "numbers")
    task = MathTask(instruction="", answer=Boxed(evaluated=True))

    def prompt(question: Question) -> Prompt:
        return task.prompt({"problem": question.text, "answer": str(question.answer)})

    texts = {question.text for _, question in zip(range(300), drawn("train", 0), strict=False)}
    tokenizer = make_tokenizer([*sorted(texts), r"\boxed", *FILLERS])
    world = World(prompt=prompt, train=train, demonstrate=demonstrate)
    minutes = make(world, tokenizer, recipe, options, dtype=torch.bfloat16)
    example = Question("Which is larger, 20-3-5 or 7+6?", (Problem((20, 3, 5), "--"), Problem((7, 6), "+")))
    page = Page(
        output=options.output,
        recipe=recipe,
        script="make_numbers_policy.py",
        what="A Qwen3 of {:,} parameters with a byte-level tokenizer of its own, which adds, subtracts and compares\n"
        "numbers from 1 to 20 and errs on purpose.",
        example=(example.text, demonstrate(example, random.Random(0), Recipe(**dict.fromkeys(RATES, 0)))),
        errors="Slips are random wrong results and signs. Misconceptions forget the carry (`17+5=12`) or compare "
        "numbers by their first\ncharacters (`9>12`).",
    )
    write_card(page, {kind: list(map(prompt, held_out(kind))) for kind in KINDS}, 96, minutes)


if __name__ == "__main__":
    main()
