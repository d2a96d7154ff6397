r"""Questions of one or two hops about fields of the World Factbook, whose documents `Search` looks up.

The worked solution of ``What is the capital of the country or territory whose Internet country
code is .ke?``, its results cut::

    <search>Internet country code .ke</search>
    <result>- Kenya, Internet country code: .ke
    - …</result>
    <search>Capital, name Kenya</search>
    <result>- Kenya, Capital, name: Nairobi
    - …</result>
    Answer: Nairobi
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from grail_lightning.environments.factbook import Entry, factbook
from grail_lightning.environments.search import Search
from grail_lightning.tasks.arithmetic import Split, split_of, split_rng
from grail_lightning.tasks.search import SEARCH_ANSWER

# By the words of a question: the field, and what its whole text must be, so that it is one short answer.
_ASKED = {
    "capital": ("Capital, name", r"([A-Z][\w .'-]+)"),
    "Internet country code": ("Internet country code", r"(\.[a-z]{2})"),
    "aircraft registration prefix": ("Civil aircraft registration country code prefix", r"([A-Z0-9]{1,2})"),
    "highest point": ("Elevation, highest point", r"([A-Z][\w .'-]+?) [\d,]+ m"),
    "currency code": ("Exchange rates, Currency", r"[\w '-]+ \(([A-Z]{3})\) per US dollar -?"),
    "length of the coastline": ("Coastline", r"([1-9][\d,]* km)"),
}
_NAMING = ("capital", "Internet country code", "aircraft registration prefix", "highest point")
_COUNTRY = re.compile(r"[A-Z][\w' -]+")


class _Fact(NamedTuple):
    entry: Entry
    answer: str


@dataclass(frozen=True)
class FactbookSpace:
    """All questions about the World Factbook that have one short answer, which a search finds.

    A field is asked for if its text is one short value without a note. A country is named by a value that no other
    country's field contains. Each search of the worked solution finds
    a document of the path that was not found before.
    Every country belongs permanently to one split, by a hash: 80 % train, 10 % validation, 10 % test.

    Attributes:
        max_hops: 1 asks about countries by their names alone, 2 also by another field.
        top_k: The number of documents of a search, as in the environment.
    """

    max_hops: int = 2
    top_k: int = 3

    def __post_init__(self) -> None:
        if self.max_hops not in (1, 2) or self.top_k < 1:
            raise ValueError(f"`problems` must have a `max_hops` of 1 or 2 and top_k >= 1, but got {self}.")

    def sample(self, num_problems: int, split: Split, seed: int = 0) -> list[dict[str, Any]]:
        """Different questions of one split, always the same for the same arguments, as rows.

        Their columns are `problem`, `answer`, `solution`, `hops`, and `path`, the documents that lead to the answer.
        """
        facts = _facts()
        asked = [
            (words, country, naming)
            for words, known in facts.items()
            for country in known
            for naming in ((None, *_NAMING) if self.max_hops == 2 else (None,))
            if split_of(country) == split and (naming is None or (naming != words and country in facts[naming]))
        ]
        split_rng(split, seed, "factbook-").shuffle(asked)
        rows = list(islice(filter(None, (self._row(*one) for one in asked)), num_problems))
        if len(rows) < num_problems:
            raise ValueError(f"The {split} split has {len(rows)} questions, but got {num_problems}. Ask for fewer.")
        return rows

    def _row(self, words: str, country: str, naming: str | None) -> dict[str, Any] | None:
        """A question with its searches; None if they do not find its documents."""
        fact, named = _facts()[words][country], None if naming is None else _facts()[naming][country]
        place = country if named is None else f"the country or territory whose {naming} is {named.answer}"
        searches = [_search(fact, country, self.top_k)]
        if named is not None:
            searches.insert(0, _search(named, named.answer, self.top_k) if _unique(named) else None)
        if None in searches or (named is not None and fact.entry.documents[0] in str(searches[0])):
            return None
        return {
            "problem": f"What is the {words} of {place}?",
            "answer": fact.answer,
            "solution": "".join([*filter(None, searches), f"{SEARCH_ANSWER.marker} {fact.answer}"]),
            "hops": len(searches),
            "path": [one.entry.documents[0] for one in (named, fact) if one is not None],
        }


@cache
def _facts() -> dict[str, dict[str, _Fact]]:
    """By the words of a question and the country: the fields whose text is one short value."""
    texts = {(entry.country, entry.field): entry for entry in factbook()}
    facts: dict[str, dict[str, _Fact]] = defaultdict(dict)
    for asked, (field, pattern) in _ASKED.items():
        for (country, name), entry in texts.items():
            value = re.fullmatch(pattern, entry.text) if name == field and _COUNTRY.fullmatch(country) else None
            noted = any((country, f"{above}, note") in texts for above in (field, field.rpartition(", ")[0]))
            if value and not noted:
                facts[asked][country] = _Fact(entry, value[1])
    return facts


@cache
def _search(fact: _Fact, subject: str, top_k: int) -> str | None:
    """The search for a fact with its result, as a policy writes and sees it; None if it does not find the document."""
    query, search = f"{fact.entry.field} {subject}", Search(top_k, retriever="factbook")
    search.reset(path=fact.entry.documents[:1])
    result = search.search(query)
    return f"<search>{query}</search>\n<result>{result}</result>\n" if search.score_turn() else None


@cache
def _unique(fact: _Fact) -> bool:
    """Whether no other country's field has the value in it."""
    value = re.compile(rf"(?<!\w){re.escape(fact.answer)}(?!\w)", re.IGNORECASE)
    return sum(bool(value.search(text)) for text in _texts_of(fact.entry.field)) == 1


@cache
def _texts_of(field: str) -> list[str]:
    return [entry.text for entry in factbook() if entry.field == field]
