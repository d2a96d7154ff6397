"""The torchmetrics of one dataset, and the table of a test with its intervals.

Shapes: ``N`` problems, ``n`` samples of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import SumMetric

from grail_lightning.evaluation.statistics import Interval, average_interval, mean_interval
from grail_lightning.functional import pass_at_k, pass_at_k_variance
from grail_lightning.metrics import STATUSES, AnswerAccuracy, PassAtK, ResponseLengths, StatusCounts


class Figures:
    """Accuracy, pass@k, lengths and verdicts of the responses to one set of problems, over all ranks.

    Args:
        pass_at: The k of each pass@k.
        device: The device of the responses.
    """

    def __init__(self, pass_at: Sequence[int], device: torch.device) -> None:
        self.accuracy = AnswerAccuracy().to(device)
        self.problems = SumMetric().to(device)
        self.pass_at = [PassAtK(k).to(device) for k in pass_at]
        self.lengths = ResponseLengths().to(device)
        self.statuses = StatusCounts().to(device)
        # A rank without rows of this dataset must take part in the synchronisation, too.
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        self.update(nothing.bool(), nothing, nothing, nothing.bool(), [])

    def update(
        self, correct: Tensor, group: Tensor, lengths: Tensor, finished: Tensor, statuses: Sequence[str]
    ) -> None:
        """Add ``B`` responses, which form complete groups; every tensor is ``[B]``."""
        self.accuracy.update(correct)
        self.problems.update(float(len(set(group.tolist()))))
        for metric in self.pass_at:
            metric.update(correct, group)
        self.lengths.update(lengths, finished)
        self.statuses.update(statuses)

    def compute(self) -> dict[str, float]:
        """The value of every metric by its name. A collective: call it on all ranks in the same order."""
        figures = {"accuracy": self.accuracy.compute(), "problems": self.problems.compute()}
        figures |= {f"pass_at_{metric.k}": metric.compute() for metric in self.pass_at}
        figures |= {f"completions/{name}": value for name, value in self.lengths.compute().items()}
        counts = self.statuses.compute()
        total = sum(counts.values(), torch.tensor(0)).clamp(min=1)
        figures |= {f"verdict/{status}": count / total for status, count in counts.items()}
        return {name: float(value) for name, value in figures.items()}


def figure_names(pass_at: Sequence[int]) -> list[str]:
    """The names under which the figures of a set of problems are logged."""
    lengths = ("mean_length", "min_length", "max_length", "clipped_ratio")
    return [
        "accuracy",
        *(f"pass_at_{k}" for k in pass_at),
        *(f"completions/{name}" for name in lengths),
        *(f"verdict/{status}" for status in STATUSES),
    ]


def test_table(correct: dict[str, Tensor], pass_at: Sequence[int]) -> str:
    """The table of a test: one line for each dataset, then the weighted and the simple average, with 95 % intervals.

    Args:
        correct: Which samples are correct, ``[N, n]`` bool for each dataset.
        pass_at: The k of each pass@k.
    """
    num_samples = next(iter(correct.values())).shape[1]
    columns = [f"acc@{num_samples}", *(["spread of runs"] if num_samples > 1 else []), *(f"pass@{k}" for k in pass_at)]
    shares = {name: _shares(right, pass_at) for name, right in correct.items()}
    rows = [(name, len(right), _cells(right, shares[name])) for name, right in correct.items()]
    if len(correct) > 1:
        everything = torch.cat(list(correct.values()))
        weighted = _cells(everything, _shares(everything, pass_at))
        rows += [("weighted by size", len(everything), weighted), ("simple average", len(rows), _average(shares))]
    width = max(len(name) for name, *_ in rows)
    lines = [f"{'':{width}}  {'problems':>8}" + "".join(f"  {column:>21}" for column in columns)]
    for name, count, cells in rows:
        spread = cells[1:2] if num_samples > 1 else []
        shown = [cells[0], *spread, *cells[2:]]
        unit = f"{count:>8}" if name != "simple average" else f"{'':>8}"
        lines.append(f"{name:{width}}  {unit}" + "".join(f"  {cell:>21}" for cell in shown))
    return "\n".join(lines)


def _shares(correct: Tensor, pass_at: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The share of correct samples and each pass@k, all ``[N]``, each with its variance ``[N]``."""
    num_samples, num_correct = correct.shape[1], correct.sum(1)
    return [
        (pass_at_k(num_samples, num_correct, k), pass_at_k_variance(num_samples, num_correct, k)) for k in (1, *pass_at)
    ]


def _cells(correct: Tensor, shares: list[tuple[Tensor, Tensor]]) -> list[str]:
    # The spread is the population standard deviation of the accuracies of the sampling runs.
    runs = f"{correct.double().mean(0).std(correction=0):.3f}"
    first, *others = (_cell(float(values.mean()), mean_interval(values, noise)) for values, noise in shares)
    return [first, runs, *others]


def _average(shares: dict[str, list[tuple[Tensor, Tensor]]]) -> list[str]:
    cells = []
    for column in zip(*shares.values(), strict=True):
        means = [float(values.mean()) for values, _ in column]
        cells.append(_cell(sum(means) / len(means), average_interval(means, [mean_interval(*v) for v in column])))
    return [cells[0], "", *cells[1:]]


def _cell(mean: float, interval: Interval) -> str:
    return f"{mean:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
