"""The torchmetrics of one set of problems.

Shapes: ``B`` responses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchmetrics import Metric, SumMetric

from grail_lightning.evaluate.records import Problem
from grail_lightning.metrics import (
    STATUSES,
    AnswerAccuracy,
    LengthsByVerdict,
    MajAtK,
    PassAtK,
    ResponseLengths,
    StatusCounts,
)


class Figures:
    """Accuracy, pass@k, maj@k, lengths and verdicts of the responses to one set of problems, over all ranks.

    Args:
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k.
        device: The device on which ranks exchange the figures.
    """

    def __init__(self, pass_at: Sequence[int], maj_at: Sequence[int], device: torch.device) -> None:
        self.accuracy = AnswerAccuracy().to(device)
        self.problems = SumMetric().to(device)
        self.pass_at = [PassAtK(k).to(device) for k in pass_at]
        self.maj_at = [MajAtK(k).to(device) for k in maj_at]
        self.lengths = ResponseLengths().to(device)
        self.by_verdict = LengthsByVerdict().to(device)
        self.statuses = StatusCounts().to(device)
        self.device = device
        # A rank without rows of this dataset must take part in the synchronisation, too.
        self.update([])

    def update(self, problems: Sequence[Problem]) -> None:
        """Add problems, each with all its samples."""

        def row(values: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
            """One entry for each response, ``[B]``."""
            return torch.tensor([value for part in values for value in part], dtype=dtype, device=self.device)

        correct = row([problem.correct for problem in problems], torch.bool)
        group = row([[number] * len(problem.correct) for number, problem in enumerate(problems)], torch.long)
        lengths = row([problem.lengths for problem in problems], torch.long)
        self.accuracy.update(correct)
        self.problems.update(float(len(problems)))
        for passed in self.pass_at:
            passed.update(correct, group)
        for vote in self.maj_at:
            vote.update(correct, group, row([problem.votes for problem in problems], torch.long))
        self.lengths.update(lengths, row([problem.finished for problem in problems], torch.bool))
        self.by_verdict.update(lengths, correct)
        self.statuses.update([status for problem in problems for status in problem.statuses])

    def compute(self) -> dict[str, float]:
        """The value of every metric by its name. A collective: call it on all ranks in the same order."""
        figures = {"accuracy": self.accuracy.compute(), "problems": self.problems.compute()}
        figures |= {f"pass_at_{metric.k}": metric.compute() for metric in self.pass_at}
        figures |= {f"maj_at_{metric.k}": metric.compute() for metric in self.maj_at}
        lengths: list[Metric] = [self.lengths, self.by_verdict]
        for metric in lengths:
            figures |= {f"completions/{name}": value for name, value in metric.compute().items()}
        counts = self.statuses.compute()
        total = sum(counts.values(), torch.tensor(0)).clamp(min=1)
        figures |= {f"verdict/{status}": count / total for status, count in counts.items()}
        return {name: float(value) for name, value in figures.items()}


def accuracy_names(pass_at: Sequence[int], maj_at: Sequence[int]) -> list[str]:
    """The names of the figures that are averaged over datasets."""
    return ["accuracy", *(f"pass_at_{k}" for k in pass_at), *(f"maj_at_{k}" for k in maj_at)]


def figure_names(pass_at: Sequence[int], maj_at: Sequence[int]) -> list[str]:
    """The names under which the figures of a set of problems are logged."""
    lengths = ("mean_length", "min_length", "max_length", "clipped_ratio", "mean_length_right", "mean_length_wrong")
    return [
        *accuracy_names(pass_at, maj_at),
        *(f"completions/{name}" for name in lengths),
        *(f"verdict/{status}" for status in STATUSES),
    ]
