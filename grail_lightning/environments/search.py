"""The world of search: questions of several hops, whose facts a policy has to look up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from grail_lightning.environments.factbook import factbook_corpus
from grail_lightning.environments.facts import fact_graph
from grail_lightning.environments.retrieval import Corpus, Retriever, connect

NOTHING_FOUND = "Nothing was found."


class Search:
    """A search over documents, as an environment in the form of TRL. Its only tool is `search`.

    The documents are those of the graph that the row names, or those of a server. The answer is not given here: it is
    the text of the last turn, which the task grades.

    Args:
        top_k: The number of documents that a search returns at most. The documents of generated questions are found
            with 2 or more.
        retriever: The address of a server that speaks Search-R1's `/retrieve`, such as http://127.0.0.1:8000/retrieve;
            `factbook` searches the World Factbook, null the documents of the row's graph.
        timeout_seconds: How long the server may be silent. Does not apply without `retriever`.
        retries: How often a request to the server is repeated. Does not apply without `retriever`.

    Raises:
        ValueError: If `top_k` is below 1, the server does not answer, or the Factbook is not installed.
    """

    def __init__(
        self, top_k: int = 2, retriever: str | None = None, timeout_seconds: float = 5.0, retries: int = 2
    ) -> None:
        if top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, but got {top_k}.")
        self._top_k = top_k
        self._shared: Retriever | None = None  # What all rows search.
        if retriever is not None:
            named = retriever == "factbook"
            self._shared = factbook_corpus() if named else connect(retriever, timeout_seconds, retries)
        self.reset()

    def reset(self, problem: str = "", graph: int | None = None, path: Sequence[str] = (), **columns: object) -> None:
        """Begin a rollout.

        Args:
            problem: The question.
            graph: The seed of the graph whose documents are searched. It is not read if there is a `retriever`.
            path: The documents that lead to the answer; without them, turns have no score.
            columns: The other columns of the row, which are not read.
        """
        self._problem, self._path = problem, frozenset(map(_line, path))
        self._documents: Retriever | None = self._shared or (None if graph is None else _corpus(graph))
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
        found = [_line(document) for document in self._documents.documents(query, self._top_k)]
        self._gain |= any(line in self._path and line not in self._seen for line in found)
        self._seen = self._seen.union(found)
        return "\n".join(f"- {line}" for line in found) or NOTHING_FOUND

    def score_turn(self) -> float | None:
        """1 if the turn's search found a document of the path that was not found before, else 0; None without one."""
        gain, self._gain = self._gain, None
        return None if gain is None or not self._path else float(gain)

    def state_key(self) -> Hashable:
        """The question, and the set of documents that were found so far."""
        return self._problem, self._seen


def _line(document: str) -> str:
    """A document as one line."""
    return " ".join(document.split())


@lru_cache(maxsize=256)
def _corpus(graph: int) -> Corpus:
    return Corpus(fact.document for fact in fact_graph(graph).facts)
