"""Questions of one or two hops about fields of the World Factbook, whose documents `Search` looks up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal, NamedTuple

from grail_lightning.environments.retrieval import Entry, factbook
from grail_lightning.environments.search import Search
from grail_lightning.tasks.arithmetic import Split, split_of, split_rng

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

    def sample(self, num_problems: int, split: Split, seed: int = 0) -> list[dict[str, Any]]:
        """Different questions of one split as rows of `problem`, `answer`, `solution`, `hops` and `path`."""
        facts, describing = _facts(), [None, *list(_ASKED)[:4]][: 5 if self.max_hops == 2 else 1]
        asked = [(*key, by) for key in facts for by in describing if split_of(key[1]) == split and by != key[0]]
        split_rng(split, seed, "factbook-").shuffle(asked)
        rows = list(islice(filter(None, (self._row(*one) for one in asked)), num_problems))
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
