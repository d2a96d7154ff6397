"""The data module of questions whose facts are looked up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from grail_lightning.core.data.sources import DatasetSpec
from grail_lightning.core.records.task import Task
from grail_lightning.worlds.generated import GeneratedData, tags_task
from grail_lightning.worlds.search.environment import Search
from grail_lightning.worlds.search.task import SEARCH_ANSWER, FactbookSpace, SearchSpace


class SearchData(GeneratedData):
    """Questions of several hops, generated or about the World Factbook, whose facts are looked up with `Search`.

    The graphs of facts that training, validation and test questions are about are disjoint, too. The columns are
    `problem`, `answer`, `hops`, `path` and `graph`, see `SearchSpace`, so `curriculum: {column: hops, …}` works.
    Questions of a `FactbookSpace` have solutions for `few_shot`.

    Args:
        problems: The space of questions: numbers of hops and of graphs; or a `FactbookSpace`.
        task: The task; default an `EnvironmentTask` with `Search` in plain tags and no instructions, whose answer
            follows `Answer:` and is compared as text: what the packaged policy `search` knows.
        **options: The other arguments of `GeneratedData`.
    """

    def __init__(
        self,
        problems: SearchSpace | FactbookSpace = SearchSpace(),  # noqa: B008  (frozen)
        task: Task | None = None,
        **options: Any,
    ) -> None:
        tool: Callable[[], object] = Search
        if isinstance(problems, FactbookSpace):
            tool = partial(Search, problems.top_k, retriever="factbook")
        super().__init__(DatasetSpec("search"), problems, task or tags_task(tool, SEARCH_ANSWER), **options)
