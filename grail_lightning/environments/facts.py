"""Generated worlds of facts: people, towns, firms and countries with made-up names, and a short document for each fact.

Every relation of a subject has exactly one object, so a chain of relations that begins with an entity has one answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

Kind = Literal["person", "firm", "town", "country"]

FIRST_NAMES = (
    *("Ada", "Bruno", "Clara", "Dario", "Elsa", "Finn", "Greta", "Henk", "Ines", "Jonas", "Kira", "Lars"),
    *("Mara", "Nils", "Olga", "Pavel", "Rosa", "Sven", "Tilda", "Ugo", "Vera", "Wim", "Yara", "Zeno"),
)
_STEMS = (
    *("Bal", "Cor", "Dren", "Fal", "Gor", "Hask", "Jor", "Kel", "Lun", "Mir", "Nor", "Ost"),
    *("Pel", "Quin", "Rav", "Sel", "Tor", "Und", "Vol", "Wick", "Yar", "Zel", "Brim", "Trav"),
)
_ENDINGS: dict[Kind, tuple[str, ...]] = {
    "person": ("dahl", "kamp", "mont", "rick", "stein"),
    "firm": ("tek", "corp"),
    "town": ("ford", "burg", "wick"),
    "country": ("land",),
}
_SIZES: dict[Kind, int] = {"person": 32, "firm": 8, "town": 12, "country": 4}


@dataclass(frozen=True)
class Relation:
    """A relation between two kinds of entities."""

    name: str  # In questions: "the home of Mara Voss".
    subject: Kind
    object: Kind
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

    entities: Mapping[Kind, tuple[str, ...]]
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


def _names(kind: Kind, number: int, rng: random.Random) -> tuple[str, ...]:
    """Different names, of twice as many; surnames are different, too."""
    known = [stem + ending for ending in _ENDINGS[kind] for stem in _STEMS]
    last = rng.sample(known[: 2 * number], number)
    return tuple(f"{rng.choice(FIRST_NAMES)} {name}" if kind == "person" else name for name in last)


def _cycle(people: tuple[str, ...], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Each person with another one, in one cycle."""
    order = rng.sample(people, len(people))
    return zip(order, [*order[1:], order[0]], strict=True)
