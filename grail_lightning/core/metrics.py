"""torchmetrics of rollouts: accuracy, pass@k and maj@k with state, based on `grail_lightning.core.functional`.

Shapes: ``B`` rows (rollouts), ``N`` problems. A metric keeps the value of each problem, with its noise: the variance of
the value over other samples of the same problem. Intervals are made of both (`grail_lightning.app.results.statistics`).
Batches may differ in size; a rank without rows updates with empty tensors. A metric without values is NaN.

Values of problems are summed as whole multiples of 2^-40, so that a sum does not depend on the order of its terms, and
any number of ranks reports the same figure to the last digit. Every metric takes the options of
`torchmetrics.Metric`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from grail_lightning.core.functional.pass_at_k import maj_at_k, pass_at_k, pass_at_k_variance

_UNIT = 2**-40


def problem_metrics(pass_at: Iterable[int] = (), maj_at: Iterable[int] = (), **options: Any) -> MetricCollection:
    """The metrics ``accuracy``, ``pass_at_<k>`` and ``maj_at_<k>``; `options` are those of `torchmetrics.Metric`.

    >>> metrics = problem_metrics(pass_at=[2], maj_at=[3])
    >>> right, votes = torch.tensor([True, True, False]), torch.tensor([0, 0, 1])
    >>> metrics.update(correct=right, group=torch.zeros(3), votes=votes)
    >>> {name: round(float(value), 3) for name, value in metrics.compute().items()}
    {'accuracy': 0.667, 'maj_at_3': 1.0, 'pass_at_2': 1.0}
    """
    metrics: dict[str, Metric | MetricCollection] = {"accuracy": AnswerAccuracy(**options)}
    metrics |= {f"pass_at_{k}": PassAtK(k, **options) for k in pass_at}
    metrics |= {f"maj_at_{k}": MajAtK(k, **options) for k in maj_at}
    return MetricCollection(metrics, compute_groups=False)


class ProblemMean(Metric):
    """Mean over problems of a value in [0, 1]; the values of the problems and their noise are states."""

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    values: list[Tensor]
    noise: list[Tensor]

    def __init__(self, k: int = 1, **options: Any) -> None:
        super().__init__(**options)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, but got {k}.")
        self.k = k
        for name in ("values", "noise"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def _add(self, values: Tensor, noise: Tensor) -> None:
        """Add problems by their values and the noise of these ``[N]``, float64 on the CPU."""
        self.values.append(values.to(self.device))
        self.noise.append(noise.to(self.device))

    def share(self) -> tuple[Tensor, Tensor]:
        """The values of the problems and their noise, ``[N]`` float64 each, in the order in which they were added."""
        return _joined(self.values), _joined(self.noise)

    def compute(self) -> Tensor:
        """The mean, a float32."""
        values = _joined(self.values).cpu()
        mean = (values / _UNIT).round().long().sum().double() * _UNIT / len(values)
        return mean.float().to(self.device)


def _joined(parts: list[Tensor] | Tensor) -> Tensor:
    """The parts of a state as one tensor, which it is already after a reduction over ranks."""
    return dim_zero_cat(parts) if len(parts) else torch.zeros(0, dtype=torch.float64)


class PassAtK(ProblemMean):
    """Mean over problems of the unbiased pass@k (`grail_lightning.core.functional.pass_at_k`).

    Its noise is `grail_lightning.functional.pass_at_k_variance`.

    >>> metric = PassAtK(k=2)
    >>> metric.update(torch.tensor([True, False, False, False, False, False]), torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> metric.compute()  # 1 of 3 right: 1 - C(2,2)/C(3,2) = 2/3; 0 of 3: 0
    tensor(0.3333)
    """

    def update(self, correct: Tensor, group: Tensor) -> None:
        """Add problems with at least `k` samples each: the right ones ``[B]``, and the number of each one's problem.

        Problems are added in the order of their numbers.
        """
        _, problem, num_samples = torch.unique(group.cpu(), return_inverse=True, return_counts=True)
        num_correct = torch.zeros_like(num_samples).index_add(0, problem, correct.cpu().long())
        noise = torch.zeros(len(num_samples), dtype=torch.float64)
        for number in num_samples.unique().tolist():
            rows = num_samples == number
            noise[rows] = pass_at_k_variance(number, num_correct[rows], self.k)
        self._add(pass_at_k(num_samples, num_correct, self.k), noise)


class AnswerAccuracy(PassAtK):
    """Share of right responses. With equally many samples a problem it is acc@n, the mean over problems of pass@1.

    >>> accuracy = AnswerAccuracy()
    >>> accuracy.update(torch.tensor([True, False, True, True]), torch.tensor([0, 0, 1, 1]))
    >>> accuracy.compute()
    tensor(0.7500)
    """

    num_correct: Tensor
    num_samples: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(k=1, **options)
        for name in ("num_correct", "num_samples"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, correct: Tensor, group: Tensor) -> None:
        """Add responses as in `PassAtK`."""
        super().update(correct, group)
        self.num_correct += correct.sum()
        self.num_samples += len(correct)

    def compute(self) -> Tensor:
        """The share, a float32."""
        return self.num_correct / self.num_samples


class MajAtK(ProblemMean):
    r"""Mean over problems of the unbiased maj@k (`grail_lightning.functional.maj_at_k`).

    The noise of a value :math:`x` of :math:`n` samples is :math:`x(1 - x) k / n`, as of :math:`n / k` binary votes.

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
        ordered = [samples[problem] for problem in sorted(samples)]
        shares = [maj_at_k([vote for vote, _ in pairs], [right for _, right in pairs], self.k) for pairs in ordered]
        values, num_samples = torch.tensor(shares, dtype=torch.float64), torch.tensor([len(pairs) for pairs in ordered])
        self._add(values, values * (1 - values) * (self.k / num_samples.double()))
