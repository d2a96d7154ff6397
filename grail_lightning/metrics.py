"""torchmetrics of rollouts: accuracy, pass@k and maj@k with state, based on `grail_lightning.functional`.

Shapes: ``B`` rows (rollouts). Every state is a sum or a count. Ranks and batches may therefore be merged in any order
and may differ in size; a rank without rows updates with empty tensors. A metric without values is NaN.

Shares of problems are summed as whole multiples of 2^-40, so that a sum does not depend on the order of its terms, and
any number of ranks reports the same figure to the last digit. Every metric takes the options of
`torchmetrics.Metric`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from grail_lightning.functional import maj_at_k, pass_at_k

_UNIT = 2**-40


class AnswerAccuracy(MeanMetric):
    """Share of right responses: a `torchmetrics.MeanMetric` over samples.

    With equally many samples a problem this is acc@n, the mean over problems of the share of right samples.

    >>> accuracy = AnswerAccuracy()
    >>> accuracy.update(torch.tensor([True, False, True, True]))
    >>> accuracy.compute()
    tensor(0.7500)
    """

    def update(self, correct: Tensor) -> None:  # type: ignore[override]
        """Add responses, of which ``correct [B]`` are right."""
        super().update(correct.float())


class _ProblemMean(Metric):
    """Mean over problems of a figure in [0, 1], of which sum and count are states."""

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, but got {k}.")
        self.k = k
        for name in ("total", "count"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, values: Tensor) -> None:
        """Add problems by their figures ``[N]`` float64 on the CPU."""
        self.total += (values / _UNIT).round().long().sum().to(self.total.device)
        self.count += len(values)

    def compute(self) -> Tensor:
        mean = self.total.cpu().double() * _UNIT / self.count.cpu()
        return mean.float().to(self.total.device)


class PassAtK(_ProblemMean):
    """Mean over problems of the unbiased pass@k (`grail_lightning.functional.pass_at_k`).

    >>> metric = PassAtK(k=2)
    >>> metric.update(torch.tensor([True, False, False, False, False, False]), torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> metric.compute()  # 1 of 3 right: 1 - C(2,2)/C(3,2) = 2/3; 0 of 3: 0
    tensor(0.3333)
    """

    def update(self, correct: Tensor, group: Tensor) -> None:
        """Add problems with at least `k` samples each: the right ones ``[B]``, and the number of each one's problem."""
        _, problem, num_samples = torch.unique(group.cpu(), return_inverse=True, return_counts=True)
        num_correct = torch.zeros_like(num_samples).index_add(0, problem, correct.cpu().long())
        self._add(pass_at_k(num_samples, num_correct, self.k))


class MajAtK(_ProblemMean):
    """Mean over problems of the unbiased maj@k (`grail_lightning.functional.maj_at_k`).

    >>> metric = MajAtK(k=3)
    >>> votes = torch.tensor([0, 0, 1, 0, 1, 1])
    >>> metric.update(torch.tensor([True, True, False, True, False, False]), torch.tensor([0, 0, 0, 1, 1, 1]), votes)
    >>> metric.compute()  # right, and outvoted
    tensor(0.5000)
    """

    def update(self, correct: Tensor, group: Tensor, votes: Tensor) -> None:
        """Add problems as in `PassAtK`; `votes` ``[B]`` are equal for equal answers, and negative without one.

        They are those of `grail_lightning.answers.answer_classes`.
        """
        samples: dict[int, list[tuple[int, bool]]] = {}
        for problem, vote, right in zip(group.tolist(), votes.tolist(), correct.tolist(), strict=True):
            samples.setdefault(problem, []).append((vote, right))
        values = [maj_at_k([v for v, _ in own], [r for _, r in own], self.k) for own in samples.values()]
        self._add(torch.tensor(values, dtype=torch.float64))
