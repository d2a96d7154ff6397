"""Generated worlds of facts: people, towns, firms and countries with made-up names, and a short document for each fact.

Every relation of a subject has exactly one object, so a chain of relations that begins with an entity has one answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal

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


@dataclass(frozen=True)
class GraphSize:
    """How many entities a graph has.

    Attributes:
        people: The number of people, at least that of the towns, of the firms and of the countries; at most 120.
        firms: The number of firms, at most 48.
        towns: The number of towns, at least that of the countries, at most 72.
        countries: The number of countries, at most 24.
    """

    people: int = 32
    firms: int = 8
    towns: int = 12
    countries: int = 4

    def __post_init__(self) -> None:
        sizes: dict[Kind, int] = {
            "person": self.people,
            "firm": self.firms,
            "town": self.towns,
            "country": self.countries,
        }
        whole = all(isinstance(n, int) and 2 <= n <= len(_STEMS) * len(_ENDINGS[kind]) for kind, n in sizes.items())
        if not whole or not max(self.firms, self.towns) <= self.people or not self.countries <= self.towns:
            raise ValueError(
                "A graph must have 2 to 120 `people`, 2 to 48 `firms`, 2 to 72 `towns` and 2 to 24 `countries`, no "
                f"more countries than towns, and no more towns or firms than people, but got {self}."
            )


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
def fact_graph(seed: int, size: GraphSize) -> FactGraph:
    """The graph of a seed, the same on every machine."""
    rng = random.Random(f"facts-{seed}")  # noqa: S311 - a puzzle, not a secret
    people, firms, towns, countries = (
        _names(kind, number, rng)
        for kind, number in zip(_ENDINGS, (getattr(size, field.name) for field in fields(size)), strict=True)
    )
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
    entities: dict[Kind, tuple[str, ...]] = {"person": people, "firm": firms, "town": towns, "country": countries}
    return FactGraph(entities, tuple(facts))


def read_graph(columns: Mapping[str, Any]) -> FactGraph:
    """The graph of a row's column `graph`: its seed, and its size if it is not the usual one."""
    options = {str(name): value for name, value in columns.items()}
    seed = options.pop("seed", None)
    known = {field.name for field in fields(GraphSize)}
    if not isinstance(seed, int) or not set(options) <= known:
        raise ValueError(
            f"The column `graph` must have a whole number as `seed` and, of {sorted(known)}, what is not the default, "
            f"but got {dict(columns)!s:.200}."
        )
    return fact_graph(seed, GraphSize(**options))


def _names(kind: Kind, number: int, rng: random.Random) -> tuple[str, ...]:
    """Different names, of twice as many; surnames are different, too."""
    known = [stem + ending for ending in _ENDINGS[kind] for stem in _STEMS]
    last = rng.sample(known[: 2 * number], number)
    return tuple(f"{rng.choice(FIRST_NAMES)} {name}" if kind == "person" else name for name in last)


def _cycle(people: tuple[str, ...], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Each person with another one, in one cycle."""
    order = rng.sample(people, len(people))
    return zip(order, [*order[1:], order[0]], strict=True)
