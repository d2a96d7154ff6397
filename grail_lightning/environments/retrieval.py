"""Where documents are searched: an index in memory, and a server that speaks Search-R1's `/retrieve`.

Queries are written by a policy. They are reduced to words before they reach the index, and no query raises.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import weakref
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any
from urllib.parse import urlsplit

from grail_lightning.environments.web import check_address, post

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
            found = self._connection.execute(
                f"SELECT text FROM documents WHERE documents MATCH ? {order}",  # noqa: S608 - a constant
                (" OR ".join(words), k),
            )
            return [text for (text,) in found]


class RemoteRetriever:
    r"""A server that speaks Search-R1's `/retrieve`: ``POST {"queries": […], "topk": k, "return_scores": true}``.

    It answers ``{"result": [[{"document": {"contents": "title\ntext"}, "score": …}, …]]}``; documents without scores,
    and documents that are text, are read as well.

    Args:
        url: The address, such as `http://127.0.0.1:8000/retrieve`; without a path, `/retrieve` is added.
        timeout_seconds: How long the server may be silent.
        retries: How often a request is repeated.

    Raises:
        ValueError: If the address is none, or the server does not answer a first request.
    """

    def __init__(self, url: str, timeout_seconds: float, retries: int) -> None:
        check_address("retriever", url, "http://127.0.0.1:8000/retrieve")
        self.url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/retrieve"
        self._post = partial(post, self.url, seconds=timeout_seconds, retries=retries)
        try:
            self.documents("test", 1)
        except ValueError as error:
            raise ValueError(
                f"`retriever` must be a server that answers Search-R1's /retrieve, but got: {error} Start it, or "
                "correct the address."
            ) from None

    def documents(self, query: str, k: int) -> list[str]:
        """At most `k` documents, the best first; a ValueError if the server gives no answer that can be read."""
        answer = self._post({"queries": [query[:_QUERY_CHARACTERS]], "topk": k, "return_scores": True})
        try:
            return [_contents(item) for item in answer["result"][0][:k]]
        except (LookupError, TypeError):
            raise ValueError(
                f'{self.url} must answer {{"result": [[{{"document": {{"contents": …}}}}, …]]}}, '
                f"but got {str(answer)[:200]!r}."
            ) from None


def _contents(item: Any) -> str:
    """The text of a document of an answer."""
    document = item.get("document", item) if isinstance(item, dict) else item
    text = document["contents"] if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise TypeError
    # JSON can hold halves of surrogate pairs, which no tokenizer takes.
    return text[:_DOCUMENT_CHARACTERS].encode(errors="replace").decode()


Retriever = Corpus | RemoteRetriever
# All environments with the same options share a client; the server is asked when it is made.
connect = lru_cache(maxsize=16)(RemoteRetriever)
