r"""Questions of several hops over generated facts, and demonstrations of how they are looked up, with mistakes.

A demonstration for ``Who is the mayor of the home of Mara Voldahl?``, with the results that `Search` gives::

    <search>lives Mara Voldahl</search>
    <result>- Mara Voldahl lives in the town Corford.
    - The doctor of Mara Voldahl is Tilda Ostrick.</result>
    <search>mayor Corford</search>
    <result>- The mayor of the town Corford is Finn Pelmont.
    - The town Corford lies in Jorland.</result>
    Answer: Finn Pelmont
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any

from grail_lightning.answers import Marker
from grail_lightning.environments.search import RELATIONS, Fact, FactGraph, Kind, Relation, Search, fact_graph
from grail_lightning.tasks.arithmetic import Split, distinct, split_of, split_rng

SEARCH_ANSWER = Marker("Answer:")
_ASK: dict[Kind, str] = {"person": "Who", "firm": "Which firm", "town": "Which town", "country": "Which country"}


@dataclass(frozen=True)
class SearchProblem:
    """A question, and the facts that lead to its answer."""

    seed: int  # Of the graph.
    path: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """The question, such as `Who is the mayor of the home of Mara Voldahl?`."""
        chain = "".join(f"the {fact.relation.name} of " for fact in reversed(self.path))
        return f"{_ASK[self.path[-1].relation.object]} is {chain}{self.path[0].subject}?"

    def row(self) -> dict[str, Any]:
        """The columns of the question; see `SearchSpace.sample`."""
        path = [fact.document for fact in self.path]
        return {
            "problem": self.text,
            "answer": self.path[-1].object,
            "hops": len(path),
            "path": path,
            "graph": self.seed,
        }


@dataclass(frozen=True)
class SearchSpace:
    """The set of all questions of a kind, from which seeded draws are made.

    Every question and every graph belongs permanently to one split, by a hash: 80 % train, 10 % validation, 10 % test.
    What a policy keeps in mind of the training graphs therefore answers no question of another split.

    Attributes:
        min_hops: The smallest number of facts on the path to an answer.
        max_hops: The largest number of facts on the path to an answer.
    """

    min_hops: int = 2
    max_hops: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_hops <= self.max_hops <= 6:
            raise ValueError(
                f"`problems` must have 1 <= min_hops <= max_hops <= 6, but got {self.min_hops} and {self.max_hops}."
            )

    def sample(self, num_problems: int, split: Split, seed: int = 0) -> list[dict[str, Any]]:
        """Different questions of one split, always the same for the same arguments, as rows.

        Their columns are `problem`, `answer`, `hops`, `path` (the documents that lead to the answer, in order) and
        `graph` (its seed). `Search.reset` takes the rows as they are.
        """
        return [problem.row() for problem in self.draw(num_problems, split, seed)]

    def draw(self, num_problems: int, split: Split, seed: int = 0) -> list[SearchProblem]:
        """The questions of `sample`."""
        rng, graphs = split_rng(split, seed, "search-"), _graphs(split)

        def problem() -> SearchProblem:
            graph, path = rng.choice(graphs), None
            while path is None:
                path = _walk(rng, fact_graph(graph), rng.randint(self.min_hops, self.max_hops))
            return SearchProblem(graph, path)

        return distinct(problem, lambda drawn: drawn.text, num_problems, split, "`max_hops`")


@cache
def _graphs(split: Split) -> list[int]:
    """The seeds of the first 200 graphs of a split."""
    return [*islice((seed for seed in count() if split_of(f"graph {seed}") == split), 200)]


def _walk(rng: random.Random, graph: FactGraph, hops: int) -> tuple[Fact, ...] | None:
    """A path of different relations through different entities; None if it ended too early."""
    kind: Kind = rng.choice(("person", "person", "firm", "town", "country"))
    entity = rng.choice(graph.entities[kind])
    path: list[Fact] = []
    for _ in range(hops):
        used, visited = {fact.relation for fact in path}, {fact.subject for fact in path}
        usable = [relation for relation in RELATIONS if relation.subject == kind and relation not in used]
        if not usable:
            return None
        path.append(graph.by_subject[entity, rng.choice(usable)])
        entity, kind = path[-1].object, path[-1].relation.object
        if entity in visited:
            return None
    return tuple(path)


def search_demonstration(
    problem: SearchProblem,
    rng: random.Random,
    *,
    query: float = 0.0,
    reading: float = 0.0,
    early: float = 0.0,
    again: float = 1.0,
) -> list[tuple[str, str]]:
    """The turns of a rollout with random mistakes: what a policy writes, and what the environment answers to it.

    At these probabilities a search has the relation of another hop or another name (`query`), another name of the
    result is taken than the one that was asked for (`reading`), a name is given as the answer before the path is at its
    end (`early`), and a search that did not find its fact is repeated with the right query (`again`).
    """
    environment = Search()
    environment.reset(**problem.row())
    entity, turns = problem.path[0].subject, []
    names, relations = [entity], [fact.relation for fact in problem.path]
    for hop, relation in enumerate(relations):
        if hop and rng.random() < early:
            break
        for attempt in range(2):
            word, name = relation.word, entity
            if not attempt and rng.random() < query:
                word, name = _wrong_query(rng, relation, entity, relations, names)
            result = environment.search(f"{word} {name}")
            turns.append((f"<search>{word} {name}</search>", f"\n<result>{result}</result>\n"))
            found = [fact_graph(problem.seed).by_document[line] for line in result.removeprefix("- ").split("\n- ")]
            sought = next((fact for fact in found if (fact.subject, fact.relation) == (entity, relation)), None)
            if sought is not None or rng.random() >= again:
                break
        others = sorted({name for fact in found for name in (fact.subject, fact.object)} - {entity})
        if sought is None or (len(others) > 1 and rng.random() < reading):
            entity = rng.choice([name for name in others if sought is None or name != sought.object])
        else:
            entity = sought.object
        names.append(entity)
    return [*turns, (f"{SEARCH_ANSWER.marker} {entity}", "")]


def _wrong_query(
    rng: random.Random, relation: Relation, entity: str, relations: list[Relation], names: list[str]
) -> tuple[str, str]:
    """A query with another relation of the question, or with a name that was there before."""
    earlier = [name for name in names if name != entity]
    if earlier and rng.random() < 0.5:
        return relation.word, rng.choice(earlier)
    return rng.choice([other for other in relations if other != relation] or list(RELATIONS)).word, entity
