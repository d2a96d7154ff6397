"""The samples of one problem together, as metrics and tables take them: without texts, so that ranks can share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from grail_lightning.answers import answer_classes, text_classes
from grail_lightning.evaluation.records import Sample
from grail_lightning.tasks.base import Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The verdicts on the ``n`` samples of one problem; every tuple has ``n`` entries, in the order of the samples.

    Attributes:
        dataset: The name of the dataset.
        index: The place of the problem in the dataset.
        columns: Short further columns of the row.
        correct: Which samples are right.
        statuses: The status of each verdict.
        lengths: Generated tokens.
        finished: Whether a response ended by itself.
        votes: Equal numbers for equal answers, -1 without an answer.
    """

    dataset: str
    index: int
    columns: dict[str, Any]
    correct: tuple[bool, ...]
    statuses: tuple[str, ...]
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]
    votes: tuple[int, ...]


def problems_of(samples: Iterable[Sample], compare: Comparison = "math") -> list[Problem]:
    """The problems of samples; those of one problem are neighbours, in their order.

    Args:
        samples: The samples.
        compare: How answers are compared, to group them for a majority vote; see `Task.compare`.
    """
    groups = (list(group) for _, group in groupby(samples, key=lambda sample: (sample.dataset, sample.index)))
    return [
        Problem(
            dataset=group[0].dataset,
            index=group[0].index,
            columns=group[0].columns,
            correct=tuple(sample.correct for sample in group),
            statuses=tuple(sample.status for sample in group),
            lengths=tuple(sample.num_tokens for sample in group),
            finished=tuple(sample.finished for sample in group),
            votes=tuple(_votes([sample.prediction for sample in group], compare)),
        )
        for group in groups
    ]


def _votes(predictions: Sequence[str | None], compare: Comparison) -> list[int]:
    if compare == "math":
        return answer_classes(predictions)
    return text_classes(predictions, ignore_case=compare == "text")
