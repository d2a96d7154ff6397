"""Make the packaged policy `grail_lightning/worlds/assets/search`: a tiny language model that errs when it searches.

A Qwen3 of 0.9 M parameters learns from demonstrations in which facts are looked up in the real environment, with bad
queries, wrong readings of results, and answers that come too early. See make_arithmetic_policy.py for why.

    python scripts/make_search_policy.py

The same seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import cycle

from policy_making import ASSETS, Training, World, make, make_tokenizer, parse_arguments
from policy_measures import Page, write_card

from grail_lightning import SearchData
from grail_lightning.worlds.search.environment import RELATIONS, fact_graph
from grail_lightning.worlds.search.task import SearchProblem, SearchSpace, search_demonstration

# A tag is one token. A word owns the blank in front of it: names stand behind one everywhere, so that they are the same
# tokens in questions, queries, results and answers.
PIECES = r"</?\p{L}+>| ?\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}<]|<"
VOCAB_SIZE = 680
NUM_PROBLEMS = 128


@dataclass(frozen=True, kw_only=True)
class SearchRecipe(Training):
    """How a policy that searches is made; the rates are those of `search_demonstration`."""

    num_batches: int = 1400
    batch_size: int = 32
    hops: tuple[int, int] = (2, 3)  # The smallest and the largest number of hops of a question.
    query: float = 0.12  # Of a bad query.
    reading: float = 0.08  # Of a wrong reading.
    early: float = 0.05  # Of an answer that comes too early.
    again: float = 0.6  # Of a second search where the first did not find its fact.


def train(recipe: SearchRecipe) -> list[SearchProblem]:
    """Questions; those of a batch have one number of hops, so that little is padded."""
    rng, (fewest, most), size = random.Random(recipe.seed), recipe.hops, recipe.batch_size
    # To read a name off a result is learnt on short questions: the longest ones come in by and by, up to two fifths.
    progress = [k / recipe.num_batches for k in range(recipe.num_batches)]
    lengths = [rng.randint(1, 1 + int(most * 2.5 * p)) if p < 0.4 else rng.randint(fewest, most) for p in progress]
    drawn = {
        # There are not many questions of one hop.
        hops: cycle(SearchSpace(hops, hops).draw(min(batches * size, 4000 * hops), "train", recipe.seed))
        for hops, batches in Counter(lengths).items()
    }
    return [next(drawn[hops]) for hops in lengths for _ in range(size)]


def demonstrate(problem: SearchProblem, rng: random.Random, recipe: SearchRecipe) -> list[tuple[str, str]]:
    """The turns of a rollout with mistakes."""
    rates = {name: getattr(recipe, name) for name in ("query", "reading", "early", "again")}
    return search_demonstration(problem, rng, **rates)


def words() -> list[str]:
    """Every name and every word of the world, as they stand in texts."""
    graphs = [fact_graph(seed) for seed in range(100)]
    names = {part for graph in graphs for kind in graph.entities.values() for name in kind for part in name.split()}
    texts = [" ".join((r.word, r.document.format("", ""), r.name)) for r in RELATIONS]
    return [
        *(f" {name}" for name in sorted(names)),
        *texts,
        "<search></search><result></result>",
        "Answer: is the of",
        "Who",
        "Which",
    ]


def main() -> None:
    """Make, measure and save."""
    options, recipe = parse_arguments(__doc__, SearchRecipe(), ASSETS / "search")
    task, (fewest, most) = SearchData().task, recipe.hops
    world = World(prompt=lambda problem: task.prompt(problem.row()), train=train, demonstrate=demonstrate)
    minutes = make(world, make_tokenizer(words(), VOCAB_SIZE, PIECES), recipe, options)
    example = SearchSpace(fewest, fewest).draw(1, "test")[0]
    shown = "".join(part for turn in search_demonstration(example, random.Random(0)) for part in turn)
    page = Page(
        output=options.output,
        recipe=recipe,
        script="make_search_policy.py",
        what="A Qwen3 of {:,} parameters with a byte-level tokenizer of its own, which looks up the facts of a\n"
        "question and errs on purpose.",
        example=(example.text, shown),
        errors="In its demonstrations a search has the relation of another hop or another name, another name of a\n"
        "result is taken, and an answer comes before the path is at its end. A search that did not find its fact is\n"
        "sometimes repeated.",
    )
    spaces = {f"{n} hops": SearchSpace(n, n) for n in range(fewest, most + 1)}
    held_out = {
        name: [world.prompt(p) for p in space.draw(NUM_PROBLEMS, "validation")] for name, space in spaces.items()
    }
    write_card(page, held_out, 64, minutes)


if __name__ == "__main__":
    main()
