"""torchmetrics of rollouts: metrics with state, based on `grail_lightning.functional`.

Shapes: ``B`` rows (rollouts). Every state is a sum, a count or an extremum. Ranks and batches may therefore be merged
in any order and may differ in size; a rank without rows updates with empty tensors. A metric without values is NaN. For
figures of each dataset use one metric for each.

Float states are float32 because Apple's GPUs have no float64; the terms that are added to them are computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from grail_lightning.functional import pass_at_k

STATUSES = ("right", "wrong", "missing", "capped", "unparseable", "timeout", "crashed")


class AnswerAccuracy(MeanMetric):
    """Share of right responses: a `torchmetrics.MeanMetric` over samples.

    With equally many samples a problem this is acc@n, the mean over problems of the share of right samples.

    >>> accuracy = AnswerAccuracy()
    >>> accuracy.update(torch.tensor([True, False, True, True]))
    >>> accuracy.compute()
    tensor(0.7500)
    """

    def update(self, correct: Tensor) -> None:  # type: ignore[override]
        """Add responses.

        Args:
            correct: ``[B]`` bool, the right responses.
        """
        super().update(correct.float())


class PassAtK(Metric):
    """Mean over problems of the unbiased pass@k (`grail_lightning.functional.pass_at_k`).

    >>> metric = PassAtK(k=2)
    >>> metric.update(torch.tensor([True, False, False, False, False, False]), torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> metric.compute()  # 1 of 3 right: 1 - C(2,2)/C(3,2) = 2/3; 0 of 3: 0
    tensor(0.3333)

    Args:
        k: The number of samples of which one must be right.

    Raises:
        ValueError: In `update`, if a problem has fewer than `k` samples.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"`k` must be at least 1, but got {k}.")
        self.k = k
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, correct: Tensor, group: Tensor) -> None:
        """Add problems, each with all its samples.

        Args:
            correct: ``[B]`` bool, the right responses.
            group: ``[B]`` long, the index within this update of the problem that a row answers (`RolloutBatch.group`).
        """
        _, problem, num_samples = torch.unique(group.cpu(), return_inverse=True, return_counts=True)
        num_correct = torch.zeros_like(num_samples).index_add(0, problem, correct.cpu().long())
        self.total += pass_at_k(num_samples, num_correct, self.k).sum().float()
        self.count += len(num_samples)

    def compute(self) -> Tensor:
        """A scalar in [0, 1]."""
        return self.total / self.count


class ResponseLengths(Metric):
    """Mean, shortest and longest response in tokens, and the share of responses that hit the limit.

    The keys are those that are usual for GRPO: `mean_length`, `min_length`, `max_length`, `clipped_ratio`.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor
    clipped: Tensor
    shortest: Tensor
    longest: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count", "clipped"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("shortest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("longest", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, lengths: Tensor, finished: Tensor) -> None:
        """Add responses.

        Args:
            lengths: ``[B]`` long, the numbers of generated tokens.
            finished: ``[B]`` bool, whether the response ended by itself.
        """
        if not len(lengths):
            return
        self.total += lengths.sum()
        self.count += len(lengths)
        self.clipped += (~finished).sum()
        self.shortest = torch.minimum(self.shortest, lengths.min().to(self.shortest))
        self.longest = torch.maximum(self.longest, lengths.max().to(self.longest))

    def compute(self) -> dict[str, Tensor]:
        """The four figures, as scalars by name."""
        seen = self.count > 0
        return {
            "mean_length": self.total / self.count,
            "min_length": torch.where(seen, self.shortest, torch.nan),
            "max_length": torch.where(seen, self.longest, torch.nan),
            "clipped_ratio": self.clipped / self.count,
        }


class StatusCounts(Metric):
    """The number of verdicts with each status."""

    is_differentiable = False
    full_state_update = False
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(len(STATUSES), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, statuses: Sequence[str]) -> None:
        """Add verdicts.

        Args:
            statuses: The `Verdict.status` of each verdict.

        Raises:
            ValueError: If one is unknown.
        """
        for status in statuses:
            if status not in STATUSES:
                raise ValueError(f"A status must be one of {', '.join(STATUSES)}, but got {status!r}.")
            self.counts[STATUSES.index(status)] += 1

    def compute(self) -> dict[str, Tensor]:
        """The count of each status, by name."""
        return dict(zip(STATUSES, self.counts.unbind(), strict=True))
