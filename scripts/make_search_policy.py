"""Make the packaged policy `grail_lightning/assets/search`: a tiny language model that errs when it searches.

A Qwen3 of 0.9 M parameters learns from demonstrations in which facts are looked up in the real environment, with bad
queries, wrong readings of results, and answers that come too early. See make_arithmetic_policy.py for why.

    python scripts/make_search_policy.py

The same seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import tokenizers
import torch
import transformers
from policy_making import ASSETS, Training, World, make, make_tokenizer, parse_arguments
from policy_measures import PASS_AT, command, measure_turns, table

from grail_lightning.data import SearchData
from grail_lightning.environments.search import RELATIONS, fact_graph
from grail_lightning.policy import load_policy
from grail_lightning.tasks.search import (
    SearchProblem,
    SearchSpace,
    search_demonstration,
)

# A tag is one token. A word owns the blank in front of it: names stand behind one everywhere, so that they are the same
# tokens in questions, queries, results and answers.
PIECES = r"</?\p{L}+>| ?\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}<]|<"
VOCAB_SIZE = 680
NUM_PROBLEMS = 128


@dataclass(frozen=True, kw_only=True)
class SearchRecipe(Training):
    """How a policy that searches is made; the rates are those of `search_demonstration`.

    Attributes:
        hops: The smallest and the largest number of hops of a question.
        query: Of a bad query.
        reading: Of a wrong reading.
        early: Of an answer that comes too early.
        again: Of a second search where the first did not find its fact.
    """

    num_batches: int = 1400
    batch_size: int = 32
    hops: tuple[int, int] = (2, 3)
    query: float = 0.12
    reading: float = 0.08
    early: float = 0.05
    again: float = 0.6


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


def make_world(recipe: SearchRecipe) -> World:
    """Questions that are looked up."""
    task = SearchData().task
    fewest, most = recipe.hops
    return World(
        task=task,
        prompt=lambda problem: task.prompt(problem.row()),
        train=train,
        held_out={f"{n} hops": SearchSpace(n, n).draw for n in range(fewest, most + 1)},
        demonstrate=demonstrate,
        max_response_length=64,
    )


def write_card(recipe: SearchRecipe, output: Path, minutes: float) -> None:
    """Measure the saved policy on held-out questions and write the README beside its weights."""
    policy, world = load_policy(str(output)).eval(), make_world(recipe)
    figures = {
        name: measure_turns(
            policy, [world.prompt(p) for p in draw(NUM_PROBLEMS, "validation")], world.max_response_length
        )
        for name, draw in world.held_out.items()
    }
    problem = world.held_out[f"{recipe.hops[0]} hops"](1, "test")[0]
    shown = "".join(part for turn in search_demonstration(problem, random.Random(0)) for part in turn)
    (output / "README.md").write_text(f"""# The packaged policy `{output.name}`

A Qwen3 of {policy.model.num_parameters():,} parameters with a byte-level tokenizer of its own, which looks up the
facts of a question and errs on purpose. It is made for trying reinforcement learning with tools on a laptop and knows
nothing else. A question and a right rollout:

```
{problem.text}

{shown}
```

Made in {minutes:.0f} minutes by

```
{command("make_search_policy.py", recipe)}
```

with torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}.

On {NUM_PROBLEMS} held-out questions of each kind (split `validation`, seed 0), {PASS_AT} samples each at temperature 1:

{table(figures)}

In its demonstrations a search has the relation of another hop or another name, another name of a result is taken, and
an answer comes before the path is at its end. A search that did not find its fact is sometimes repeated.
""")


def main() -> None:
    """Make, measure and save."""
    options, recipe = parse_arguments(__doc__, SearchRecipe(), ASSETS / "search")
    world, tokenizer = make_world(recipe), make_tokenizer(words(), VOCAB_SIZE, PIECES)
    _, begun = make(world, tokenizer, recipe, options.output, threads=options.threads, dtype=torch.bfloat16)
    write_card(recipe, options.output, (time.perf_counter() - begun) / 60)


if __name__ == "__main__":
    main()
