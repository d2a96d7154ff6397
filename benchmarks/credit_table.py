"""The table of benchmarks/credit_quality.py: detection of errors, weights, agreement with the truths.

This module belongs to credit_quality.py and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens, ``S`` lines with a result, ``G`` prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from credit_truth import ERRORS, Estimate, World, over_prompts, rank_correlation
from torch import Tensor

from grail_lightning.functional.attribution import pairwise_auroc

Sums = tuple[Tensor, Tensor]
"""What the rows of each prompt add up to, and of how many: ``[G]`` each."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The ranks and weights that a subject gives to all rollouts.

    Attributes:
        ranks: The values ``[B, T]`` by which the tokens of a rollout are ranked.
        weights: The factor ``[B, T]`` of the advantage, an additive stage included; None for a bare score.
        seconds: The processor seconds for 1,000 rollouts, the median over batches.
    """

    ranks: Tensor
    weights: Tensor | None
    seconds: float


COLUMNS = (
    *(f"in rollout: {error}" for error in ERRORS),
    *(f"at fork: {error}" for error in ERRORS),
    *(f"weight: {kind}" for kind in ("flawed", "sound", "inherited", "filler", "answer")),
    *(f"rho ({truth}): {outcome}" for truth in "ab" for outcome in ("wrong", "right")),
)


def by_prompt(rows: Tensor, world: World) -> Sums:
    """Sums over the rows ``[B]`` of each prompt that have a value."""
    groups = rows.double().reshape(-1, world.group_size)
    return groups.nansum(1), (~groups.isnan()).double().sum(1)


def where(rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, rows, torch.nan)


def detection(lines: Tensor, world: World) -> dict[str, Sums]:
    """Flawed against sound lines of the same rollout."""
    kind, measured = world.lines.kind, world.wrong[:, None] & ~lines.isnan()
    return {
        f"in rollout: {error}": by_prompt(
            pairwise_auroc(lines, kind[error] & measured, kind["sound"] & measured), world
        )
        for error in ERRORS
    }


def agreement(ranks: Tensor, lines: Tensor, world: World) -> dict[str, Sums]:
    """Rank correlation with both truths, in wrong and in right rollouts."""
    earned = world.earned.mean(0)
    with_effect = rank_correlation(ranks, world.effect, world.reasoning)
    with_gain = rank_correlation(lines, earned, world.lines.known & ~earned.isnan())
    return {
        "rho (a): wrong": by_prompt(where(with_effect, world.wrong), world),
        "rho (a): right": by_prompt(where(with_effect, world.right), world),
        "rho (b): wrong": by_prompt(where(with_gain, world.wrong), world),
        "rho (b): right": by_prompt(where(with_gain, world.right), world),
    }


def placement(weights: Tensor, world: World) -> dict[str, Sums]:
    """Mean weight of the tokens of each kind in wrong rollouts."""
    columns = {}
    for name, mask in world.kinds.items():
        chosen = (mask & world.wrong[:, None]).double()
        totals, counts = (x.sum(1).reshape(-1, world.group_size).sum(1) for x in (weights * chosen, chosen))
        columns[f"weight: {name}"] = (totals, counts)
    return columns


def credit_columns(credit: Credit, world: World) -> dict[str, Sums]:
    lines = world.lines.highest(credit.ranks)
    columns = detection(lines, world) | agreement(credit.ranks, lines, world)
    # Weights can be compared between rollouts; raw scores differ in scale.
    comparable = credit.ranks if credit.weights is None else credit.weights
    for error, pairs in world.forks.items():
        columns[f"at fork: {error}"] = pairs.wins(*comparable[pairs.row, pairs.token])
    return columns if credit.weights is None else columns | placement(credit.weights, world)


def gain_columns(world: World) -> dict[str, Sums]:
    """The resampled truth itself; its agreement is that of its two halves."""
    one, other = world.earned
    mean = (one + other) / 2
    halves = rank_correlation(one, other, world.lines.known & ~mean.isnan())
    at_forks = {f"at fork: {error}": f.wins(*mean[f.row, f.line]) for error, f in world.forks.items()}
    return (
        detection(mean, world)
        | at_forks
        | {
            "rho (b): wrong": by_prompt(where(halves, world.wrong), world),
            "rho (b): right": by_prompt(where(halves, world.right), world),
        }
    )


@dataclass(frozen=True)
class Table:
    """Prints a table line by line.

    Attributes:
        draws: Of the bootstrap over prompts, from `resamplings`.
        compact: Whether only detection is shown, with the tokens that a method sampled.
    """

    draws: Tensor
    compact: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(c for c in COLUMNS if not self.compact or c.startswith(("in rollout", "at fork")))

    def head(self) -> None:
        extra = ["tokens"] if self.compact else []
        print("| " + " | ".join(["method", "by", *self.columns, *extra, "s / 1,000"]) + " |")
        print("|---|---|" + "--:|" * (len(self.columns) + len(extra) + 1))

    def row(self, name: str, by: str, columns: dict[str, Sums], seconds: float, tokens: float = 0.0) -> None:
        """Print a line; `tokens` is the number of sampled tokens over that of the rollouts."""
        none = Estimate(float("nan"), float("nan"), float("nan"))
        cells = [str(over_prompts(*columns[c], self.draws) if c in columns else none) for c in self.columns]
        extra = [f"{tokens:.1f}" if tokens else "0"] if self.compact else []
        print("| " + " | ".join([name, by, *cells, *extra, f"{seconds:.2f}"]) + " |", flush=True)
