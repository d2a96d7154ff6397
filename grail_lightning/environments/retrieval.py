"""Where documents are searched: an index in memory, and a server that speaks Search-R1's `/retrieve`.

Queries are written by a policy. They are reduced to words before they reach the index, and no query raises.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

_QUERY_CHARACTERS, _DOCUMENT_CHARACTERS = 500, 4000
_ANSWER_BYTES = 8_000_000
_WORD = re.compile(r"[^\W_]+")


class Retriever(ABC):
    """Finds the documents that fit a query best. Threads may share one."""

    @abstractmethod
    def documents(self, query: str, k: int) -> list[str]:
        """At most `k` documents, the best first."""


class Corpus(Retriever):
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
        """See `Retriever.documents`."""
        words = dict.fromkeys(_WORD.findall(query[:_QUERY_CHARACTERS].lower()))
        if not words:
            return []
        # Words in quotation marks are no operators, and `_WORD` leaves no quotation mark in them.
        match = " OR ".join(f'"{word}"' for word in words)
        # Rounded, because the last digits of a logarithm differ between machines.
        order = "round(bm25(documents), 6), rowid LIMIT ?"
        with self._lock:
            found = self._connection.execute(
                f"SELECT text FROM documents WHERE documents MATCH ? ORDER BY {order}",  # noqa: S608 - a constant
                (match, k),
            )
            return [text for (text,) in found]


class RemoteRetriever(Retriever):
    r"""A server that speaks Search-R1's `/retrieve`: ``POST {"queries": […], "topk": k, "return_scores": true}``.

    It answers ``{"result": [[{"document": {"contents": "title\ntext"}, "score": …}, …]]}``; documents without scores,
    and documents that are text, are read as well. A request is repeated if there is no answer in time, and at status
    429 and 5xx.

    Args:
        url: The address, such as `http://127.0.0.1:8000/retrieve`; without a path, `/retrieve` is added.
        timeout_seconds: How long the server may be silent.
        retries: How often a request is repeated.

    Raises:
        ValueError: If the address is none, or the server does not answer a first request.
    """

    def __init__(self, url: str, timeout_seconds: float, retries: int) -> None:
        import urllib3  # Not needed without a server.

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`retriever` must be an address such as http://127.0.0.1:8000/retrieve, but got {url!r}.")
        self.url = url if parts.path.strip("/") else url.rstrip("/") + "/retrieve"
        again = urllib3.Retry(
            total=retries,
            redirect=0,
            allowed_methods=None,
            status_forcelist=(429, 500, 502, 503, 504),
            backoff_factor=0.2,
            raise_on_status=False,
            respect_retry_after_header=False,
        )
        # Each request has a connection of its own: an idle one may be closed by the server at any moment.
        self._pool = urllib3.PoolManager(
            headers={"Connection": "close"}, retries=again, timeout=urllib3.Timeout(timeout_seconds)
        )
        try:
            self.documents("test", 1)
        except ValueError as error:
            raise ValueError(
                f"`retriever` must be a server that answers Search-R1's /retrieve, but got: {error} Start it, or "
                "correct the address."
            ) from None

    def documents(self, query: str, k: int) -> list[str]:
        """See `Retriever.documents`; a ValueError if the server gives no answer that can be read."""
        import urllib3

        body = {"queries": [query[:_QUERY_CHARACTERS]], "topk": k, "return_scores": True}
        try:
            answer = self._pool.request("POST", self.url, json=body, preload_content=False)
            try:
                text = answer.read(_ANSWER_BYTES, decode_content=True)
            finally:
                answer.close()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise ValueError(f"{self.url} did not answer ({type(reason).__name__}).") from None
        if answer.status != 200:
            raise ValueError(f"{self.url} answered with status {answer.status}: {text[:200]!r}.")
        try:
            return [_contents(item) for item in json.loads(text)["result"][0][:k]]
        # Too deep nesting is a RecursionError.
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(
                f'{self.url} must answer {{"result": [[{{"document": {{"contents": …}}}}, …]]}}, '
                f"but got {text[:200]!r}."
            ) from None


def _contents(item: Any) -> str:
    """The text of a document of an answer."""
    document = item.get("document", item) if isinstance(item, dict) else item
    text = document["contents"] if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise TypeError
    # JSON can hold halves of surrogate pairs, which no tokenizer takes.
    return text[:_DOCUMENT_CHARACTERS].encode(errors="replace").decode()


@lru_cache(maxsize=16)
def connect(url: str, timeout_seconds: float, retries: int) -> RemoteRetriever:
    """A client that all environments with the same options share; the server is asked when it is made."""
    return RemoteRetriever(url, timeout_seconds, retries)
