r"""Questions of several hops that `Search` looks up, over generated facts or about fields of the World Factbook.

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
import re
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any, Literal, NamedTuple

from grail_lightning.answers.find import Marker
from grail_lightning.worlds.search.environment import (
    RELATIONS,
    EntityKind,
    Fact,
    FactGraph,
    Relation,
    Search,
    fact_graph,
)
from grail_lightning.worlds.search.retrieval import Entry, factbook
from grail_lightning.worlds.splits import ProblemSplit, distinct, split_of, split_rng

SEARCH_ANSWER = Marker("Answer:")
_ASK: dict[EntityKind, str] = {"person": "Who", "firm": "Which firm", "town": "Which town", "country": "Which country"}


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

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[dict[str, Any]]:
        """Different questions of one split, always the same for the same arguments, as rows.

        Their columns are `problem`, `answer`, `hops`, `path` (the documents that lead to the answer, in order) and
        `graph` (its seed). `Search.reset` takes the rows as they are.
        """
        return [problem.row() for problem in self.draw(num_problems, split, seed)]

    def draw(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[SearchProblem]:
        """The questions of `sample`."""
        rng, graphs = split_rng(split, seed, "search-"), _graphs(split)

        def problem() -> SearchProblem:
            graph, path = rng.choice(graphs), None
            while path is None:
                path = _walk(rng, fact_graph(graph), rng.randint(self.min_hops, self.max_hops))
            return SearchProblem(graph, path)

        return distinct(problem, lambda drawn: drawn.text, num_problems, split, "`max_hops`")


@cache
def _graphs(split: ProblemSplit) -> list[int]:
    """The seeds of the first 200 graphs of a split."""
    return [*islice((seed for seed in count() if split_of(f"graph {seed}") == split), 200)]


def _walk(rng: random.Random, graph: FactGraph, hops: int) -> tuple[Fact, ...] | None:
    """A path of different relations through different entities; None if it ended too early."""
    kind: EntityKind = rng.choice(("person", "person", "firm", "town", "country"))
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
            facts = [fact_graph(problem.seed).by_document[line] for line in result.removeprefix("- ").split("\n- ")]
            sought = next((fact for fact in facts if (fact.subject, fact.relation) == (entity, relation)), None)
            if sought is not None or rng.random() >= again:
                break
        others = sorted({name for fact in facts for name in (fact.subject, fact.object)} - {entity})
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


# By the words of a question: the field, and what its whole text must be. The first four can name a country.
_ASKED = {
    "capital": ("Capital, name", r"([A-Z][\w .'-]+)"),
    "Internet country code": ("Internet country code", r"(\.[a-z]{2})"),
    "aircraft registration prefix": ("Civil aircraft registration country code prefix", r"([A-Z0-9]{1,2})"),
    "highest point": ("Elevation, highest point", r"([A-Z][\w .'-]+?) [\d,]+ m"),
    "currency code": ("Exchange rates, Currency", r"[\w '-]+ \(([A-Z]{3})\) per US dollar -?"),
    "length of the coastline": ("Coastline", r"([1-9][\d,]* km)"),
}


class _Fact(NamedTuple):
    entry: Entry
    answer: str
    unique: bool  # Whether no other country's field has the answer in it.


@dataclass(frozen=True)
class FactbookSpace:
    """All questions about the World Factbook that have one short answer, which a search finds.

    A field is asked for if its text is one short value without a note. A country is named, or described by a value that
    no other country's field contains. Each search of the worked solution finds a document of the path that was not
    found before. Every country belongs permanently to one split, by a hash: 80 % train, 10 % validation, 10 % test.

    Attributes:
        max_hops: 1 asks about countries by their names alone, 2 also by another field.
        top_k: The number of documents of a search, as in the environment.
    """

    max_hops: Literal[1, 2] = 2
    top_k: int = 3

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[dict[str, Any]]:
        """Different questions of one split as rows of `problem`, `answer`, `solution`, `hops` and `path`."""
        facts, describing = _facts(), [None, *list(_ASKED)[:4]][: 5 if self.max_hops == 2 else 1]
        questions = [(*key, by) for key in facts for by in describing if split_of(key[1]) == split and by != key[0]]
        split_rng(split, seed, "factbook-").shuffle(questions)
        rows = list(islice(filter(None, (self._row(*question) for question in questions)), num_problems))
        if len(rows) < num_problems:
            raise ValueError(f"The {split} split has only {len(rows)} questions, not {num_problems}. Ask for fewer.")
        return rows

    def _row(self, words: str, country: str, by: str | None) -> dict[str, Any] | None:
        """A question; None if what describes the country is not unique, or if a search finds nothing new."""
        fact, key, place = _facts()[words, country], _facts().get((by or "", country)), country
        if by and (key is None or not key.unique):
            return None
        hops = [(fact, country)]
        if key is not None:
            hops, place = [(key, key.answer), *hops], f"the country or territory whose {by} is {key.answer}"
        path, solution = [fact.entry.documents[0] for fact, _ in hops], ""
        search = Search(self.top_k, retriever="factbook")
        search.reset(path=path)
        for document, (fact, subject) in zip(path, hops, strict=True):
            query = f"{fact.entry.field} {subject}"
            result = search.search(query)
            if not search.score_turn() or f"- {document}" not in result.split("\n"):
                return None
            solution += f"<search>{query}</search>\n<result>{result}</result>\n"
        question, solution = f"What is the {words} of {place}?", f"{solution}Answer: {fact.answer}"
        return {"problem": question, "answer": fact.answer, "solution": solution, "hops": len(hops), "path": path}


@cache
def _facts() -> dict[tuple[str, str], _Fact]:
    """By the words of a question and the country: the fields whose text is one short value."""
    facts, noted = {}, {(e.country, e.field.removesuffix(", note")) for e in factbook() if e.field.endswith("note")}
    for words, (field, pattern) in _ASKED.items():
        entries = [entry for entry in factbook() if entry.field == field]
        for entry in entries:
            above = {(entry.country, field), (entry.country, field.split(", ")[0])}
            match = re.fullmatch(pattern, entry.text)
            if match and not above & noted and re.fullmatch(r"[A-Z][\w' -]+", entry.country):
                value = re.compile(rf"(?<!\w){re.escape(match[1])}(?!\w)", re.IGNORECASE)
                alone = sum(bool(value.search(other.text)) for other in entries) == 1
                facts[words, entry.country] = _Fact(entry, match[1], alone)
    return facts
