"""The world of search: generated facts, each with a short document, and the environment in which a policy finds them.

A world has people, towns, firms and countries with made-up names. Every relation of a subject has exactly one object,
so a chain of relations that begins with an entity has one answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from grail_lightning.worlds.search.retrieval import Corpus, RemoteRetriever, connect, factbook_corpus

EntityKind = Literal["person", "firm", "town", "country"]

_NOTHING_FOUND = "Nothing was found."

_FIRST_NAMES = (
    *("Ada", "Bruno", "Clara", "Dario", "Elsa", "Finn", "Greta", "Henk", "Ines", "Jonas", "Kira", "Lars"),
    *("Mara", "Nils", "Olga", "Pavel", "Rosa", "Sven", "Tilda", "Ugo", "Vera", "Wim", "Yara", "Zeno"),
)
_STEMS = (
    *("Bal", "Cor", "Dren", "Fal", "Gor", "Hask", "Jor", "Kel", "Lun", "Mir", "Nor", "Ost"),
    *("Pel", "Quin", "Rav", "Sel", "Tor", "Und", "Vol", "Wick", "Yar", "Zel", "Brim", "Trav"),
)
_ENDINGS: dict[EntityKind, tuple[str, ...]] = {
    "person": ("dahl", "kamp", "mont", "rick", "stein"),
    "firm": ("tek", "corp"),
    "town": ("ford", "burg", "wick"),
    "country": ("land",),
}
_SIZES: dict[EntityKind, int] = {"person": 32, "firm": 8, "town": 12, "country": 4}


@dataclass(frozen=True)
class Relation:
    """A relation between two kinds of entities."""

    name: str  # In questions: "the home of Mara Voss".
    subject: EntityKind
    object: EntityKind
    document: str  # With places for subject and object.
    word: str  # The word of the document that tells this relation from the others.


# The documents have about as many words, so that the score of a search is decided by which words a document has.
RELATIONS = (
    Relation("teacher", "person", "person", "The teacher of {} is {}.", "teacher"),
    Relation("doctor", "person", "person", "The doctor of {} is {}.", "doctor"),
    Relation("home", "person", "town", "{} lives in the town {}.", "lives"),
    Relation("employer", "person", "firm", "{} works for the firm {}.", "works"),
    Relation("founder", "firm", "person", "The firm {} was founded by {}.", "founded"),
    Relation("seat", "firm", "town", "The firm {} sits in the town {}.", "sits"),
    Relation("mayor", "town", "person", "The mayor of the town {} is {}.", "mayor"),
    Relation("country", "town", "country", "The town {} lies in {}.", "lies"),
    Relation("capital", "country", "town", "The capital of {} is the town {}.", "capital"),
    Relation("president", "country", "person", "The president of {} is {}.", "president"),
)


@dataclass(frozen=True)
class Fact:
    """A fact with its document."""

    subject: str
    relation: Relation
    object: str

    @property
    def document(self) -> str:
        """The fact as a sentence."""
        return self.relation.document.format(self.subject, self.object)


@dataclass(frozen=True, eq=False)
class FactGraph:
    """Facts about entities, drawn by a seed, in the order of their documents. It equals itself alone."""

    entities: Mapping[EntityKind, tuple[str, ...]]
    facts: tuple[Fact, ...]

    @cached_property
    def by_subject(self) -> Mapping[tuple[str, Relation], Fact]:
        """The fact of each subject and relation."""
        return {(fact.subject, fact.relation): fact for fact in self.facts}

    @cached_property
    def by_document(self) -> Mapping[str, Fact]:
        """The fact of each document."""
        return {fact.document: fact for fact in self.facts}


@lru_cache(maxsize=256)
def fact_graph(seed: int) -> FactGraph:
    """The graph of a seed, the same on every machine."""
    rng = random.Random(f"facts-{seed}")  # noqa: S311 - a puzzle, not a secret
    people, firms, towns, countries = (_names(kind, number, rng) for kind, number in _SIZES.items())
    drawn: dict[str, Iterator[tuple[str, str]]] = {
        # A cycle: nobody is the teacher of two people, so a search finds at most one other document with all words.
        "teacher": _cycle(people, rng),
        "doctor": _cycle(people, rng),
        "home": ((person, rng.choice(towns)) for person in people),
        "employer": ((person, rng.choice(firms)) for person in people),
        "founder": zip(firms, rng.sample(people, len(firms)), strict=True),
        "seat": ((firm, rng.choice(towns)) for firm in firms),
        "mayor": zip(towns, rng.sample(people, len(towns)), strict=True),
        # A capital lies in its country.
        "country": (
            (town, countries[k] if k < len(countries) else rng.choice(countries)) for k, town in enumerate(towns)
        ),
        "capital": zip(countries, towns, strict=False),
        "president": zip(countries, rng.sample(people, len(countries)), strict=True),
    }
    facts = [Fact(subject, relation, obj) for relation in RELATIONS for subject, obj in drawn[relation.name]]
    rng.shuffle(facts)
    return FactGraph({"person": people, "firm": firms, "town": towns, "country": countries}, tuple(facts))


def _names(kind: EntityKind, number: int, rng: random.Random) -> tuple[str, ...]:
    """Different names, of twice as many; surnames are different, too."""
    names = [stem + ending for ending in _ENDINGS[kind] for stem in _STEMS]
    last = rng.sample(names[: 2 * number], number)
    return tuple(f"{rng.choice(_FIRST_NAMES)} {name}" if kind == "person" else name for name in last)


def _cycle(people: tuple[str, ...], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Each person with another one, in one cycle."""
    order = rng.sample(people, len(people))
    return zip(order, [*order[1:], order[0]], strict=True)


class Search:
    """A search over documents, as an environment in the form of TRL. Its only tool is `search`.

    The documents are those of the graph that the row names, or those of a server. The answer is not given here: it is
    the text of the last turn, which the task grades.

    Args:
        top_k: The number of documents that a search returns at most. The documents of generated questions are found
            with 2 or more.
        retriever: The address of a server that speaks Search-R1's `/retrieve`, such as http://127.0.0.1:8000/retrieve;
            `factbook` searches the World Factbook, null the documents of the row's graph.
        timeout_seconds: Most seconds of one request, which is sent three times at most. Does not apply without
            `retriever`.

    Raises:
        ValueError: If `top_k` is below 1, the server does not answer, or the Factbook is not installed.
    """

    def __init__(self, top_k: int = 2, retriever: str | None = None, timeout_seconds: float = 5.0) -> None:
        if top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, but got {top_k}.")
        self._top_k = top_k
        self._shared: Corpus | RemoteRetriever | None = None  # What all rows search.
        if retriever is not None:
            named = retriever == "factbook"
            self._shared = factbook_corpus() if named else connect(retriever, timeout_seconds)
        self.reset()

    def reset(self, problem: str = "", graph: int | None = None, path: Sequence[str] = (), **columns: object) -> None:
        """Begin a rollout: `graph` is the seed of the facts, and without the documents `path` turns have no score."""
        self._problem, self._path = problem, frozenset(map(_line, path))
        self._documents: Corpus | RemoteRetriever | None = self._shared or (None if graph is None else _corpus(graph))
        self._seen: frozenset[str] = frozenset()
        self._gain: bool | None = None  # Whether the present turn found a document of the path; None without a search.

    def search(self, query: str) -> str:
        """Search the documents for the words of a query.

        Args:
            query: The words to search for.

        Returns:
            The documents that fit best, one a line.
        """
        if self._documents is None:
            raise ValueError("A search needs the row's column `graph`, or the option `retriever`, but got neither.")
        self._gain = bool(self._gain)  # A search that fails has found nothing.
        lines = [_line(document) for document in self._documents.documents(query, self._top_k)]
        self._gain |= any(line in self._path and line not in self._seen for line in lines)
        self._seen = self._seen.union(lines)
        return "\n".join(f"- {line}" for line in lines) or _NOTHING_FOUND

    def score_turn(self) -> float | None:
        """1 if the turn's search found a document of the path that was not found before, else 0; None without one."""
        sys.audit("grail_lightning.scores", type(self).__name__)
        gain, self._gain = self._gain, None
        return None if gain is None or not self._path else float(gain)

    def state_key(self) -> Hashable:
        """The question, and the set of documents that were found so far."""
        return self._problem, self._seen


def _line(document: str) -> str:
    return " ".join(document.split())


@lru_cache(maxsize=256)
def _corpus(graph: int) -> Corpus:
    return Corpus(fact.document for fact in fact_graph(graph).facts)
