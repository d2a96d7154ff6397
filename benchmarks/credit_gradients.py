"""What each credit method makes of the policy gradient: its bias, its noise, and the gain of a step.

    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py
    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py --world words --batches 32
    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py --values benchmarks/values/five_terms.npz --table baselines
    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py --values benchmarks/values/five_terms.npz --table shares
    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py --values benchmarks/values/search.npz --world search
    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py --values benchmarks/values/code.npz --world code

At the weights of the packaged policy, each method gets the same batches of rollouts, as large as those of training. The
gradient of uniform credit (Dr. GRPO: rewards less the group's mean, sums of tokens) is an unbiased estimate of the
gradient of the expected reward, so its mean over the *other* batches stands for the truth. Columns:

docs/study_credit.md explains *direction*, *gain*, *share* of the limit and *by token*. *noise*: the variance of one
batch's gradient over the squared norm of its mean. *size*: root mean square norm of one batch's gradient, over that of
uniform credit. *one token*: the largest share that a single token has in the sum of |advantage| of its batch, on
average. The limit needs the file of benchmarks/credit_values.py, as *by token* does.

Three tables: `methods`; `baselines`, where each line has its own baseline of the group; and `shares`, every method with
several shares of the group's mean as its baseline.

Every product is of two different batches, so that noise does not count as signal. Intervals are 95 %, a bootstrap over
batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from credit_baselines import baselines, more_subjects, shares
from credit_quality import continuations
from credit_subjects import Subject, in_world, own_subjects, subjects
from credit_truth import q_and_v, resamplings
from credit_values import GROUP_SIZE, PROMPTS, TOKEN_BUDGET, Lab, WorldName, open_lab, read_values, setting
from torch import Tensor

from grail_lightning import DrGRPO, GradedBatch, GroupMean, Policy, RolloutBatch
from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.assign import compute_advantages
from grail_lightning.core.step.forward import Forward
from grail_lightning.credit import CreditContext, SampledContinuations, TokenCredit, Uniform

DRAWS = 2000  # Of the bootstrap over batches.
OPTIMISERS = ("SGD", "Adam")
DEFAULT = (
    *("Uniform", "GRAIL", "Shuffled(GRAIL)", "AnswerOnly(GRAIL)", "OAR-G", "HighEntropy"),
    *("TreeAdvantage", "TreeAdvantage, permuted rewards", "TreeAdvantage, state=numbers", "PrefixWeights"),
    *("OptimalBaseline", "Resampled, bisection, K=4", "Resampled, everywhere, K=8", "Oracle, right=balanced"),
)
Credit = Callable[[int, GradedBatch, CreditContext], tuple[RolloutBatch, list[Tensor]]]
"""From the number of a batch and the batch: its rollouts with advantages, and token advantages ``[B, T]``, once or from
each half of the resampled values."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of a method on N batches, over all parameters."""

    each: Tensor  # [N, P]
    largest: Tensor  # [N]: the largest share of a token in the sum of |advantage| of its batch.
    again: Tensor | None = None  # [N, P]: from the other half of the resampled values.


def gradient(policy: Policy, batch: RolloutBatch, context: CreditContext, advantages: Tensor) -> Tensor:
    """``[P]``: of the sum of advantage ``[B, T]`` times log-probability over all response tokens."""
    forward = Forward(policy, batch, context)
    policy.zero_grad(set_to_none=True)
    for micro in forward.cut(advantages.any(1).nonzero().flatten()):
        logprobs = forward(micro).stats.logprobs  # A micro-batch has the columns of its longest row.
        (advantages[micro.rows, : logprobs.shape[1]] * logprobs).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def measure(credit: Credit, lab: Lab, rollouts: list[GradedBatch], seed: int) -> Gradients:
    """The gradients of a method on all batches."""
    each, largest = [], []
    for number, graded in enumerate(rollouts):
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit", number))
        services = {SampledContinuations: continuations(lab)}
        context = CreditContext(step=0, generator=generator, token_budget=TOKEN_BUDGET, services=services)
        batch, halves = credit(number, graded, context)
        each.append(torch.stack([gradient(lab.policy, batch, context, advantages) for advantages in halves]))
        largest.append(halves[-1].abs().max() / halves[-1].abs().sum())
    one, *other = torch.stack(each).unbind(1)
    return Gradients(each=one, largest=torch.stack(largest), again=other[0] if other else None)


def of_subject(subject: Subject, policy: Policy) -> Credit:
    """The token advantages of a method, with the baseline of its line."""
    assert isinstance(subject.method, TokenCredit)

    def credit(number: int, graded: GradedBatch, context: CreditContext) -> tuple[RolloutBatch, list[Tensor]]:
        batch = compute_advantages(graded, GROUP_SIZE, subject.advantage, DrGRPO(mask_truncated=True), policy, context)
        weights = subject.method(policy, batch, context)
        if subject.control is not None:
            weights = subject.control(weights, batch, context)
        return batch, [token_advantages(batch.advantages, weights)]

    return credit


def of_values(values: dict[str, np.ndarray], share: float, baseline: str = "value") -> Credit:
    """``Q - c V`` from the values of a file, or with another baseline of it."""

    def credit(number: int, graded: GradedBatch, context: CreditContext) -> tuple[RolloutBatch, list[Tensor]]:
        pairs = [q_and_v(values, half, number, graded, baseline) for half in (0, 1)]
        return graded.with_advantages(torch.zeros(len(graded))), [
            (q - share * v) * graded.response_mask for q, v in pairs
        ]

    return credit


def of_pairs(products: Tensor, draws: Tensor) -> Tensor:
    """``[D]``: the mean product of two different batches ``[N, N]``, for each draw of weights ``[D, N]``."""
    off = products - products.diag().diag()
    number = draws.sum(1)
    return ((draws @ off) * draws).sum(1) / (number.square() - draws.square().sum(1))


def figures(ours: Gradients, uniform: Gradients, draws: Tensor) -> dict[str, Tensor]:
    """The columns, ``[D]`` each; the first draw is the sample itself."""

    def mean(values: Tensor) -> Tensor:
        return (draws @ values) / draws.sum(1)

    sums = {}
    for name, gradients in (("ours", ours), ("uniform", uniform)):
        # The noise of resampled values is independent in the two halves, so that it drops out of their product. Adam's
        # scale keeps the noise of their mean.
        one, other = (gradients.each, gradients.each if gradients.again is None else gradients.again)
        power = (one * other).sum(1)
        one = (one + other) / 2
        rms = one.square().mean(0).sqrt().clamp(min=1e-12)
        sums[name] = {
            "signal": of_pairs(one @ one.T, draws),
            "power": mean(power),
            "along": of_pairs(one @ uniform.each.T, draws),
            "adam": of_pairs((one / rms) @ uniform.each.T, draws),
        }
    mine, base = sums["ours"], sums["uniform"]
    return {
        "direction": mine["along"] / (mine["signal"] * base["signal"]).clamp(min=1e-30).sqrt(),
        "noise": mine["power"] / mine["signal"] - 1,
        "size": (mine["power"] / base["power"]).sqrt(),
        "gain, SGD": (mine["along"] / mine["power"].sqrt()) / (base["along"] / base["power"].sqrt()),
        "gain, Adam": mine["adam"] / base["adam"],
        "one token": mean(ours.largest),
    }


def cell(values: Tensor) -> str:
    """The figure and half the width of its interval."""
    low, high = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    digits = 3 if values[0].abs() < 1 else 2
    return f"{values[0]:.{digits}f} ±{(high - low) / 2:.{digits}f}"


def chosen(options: argparse.Namespace) -> list[Subject]:
    """The lines of the table that was asked for."""
    if options.table != "methods":
        lines = {"baselines": baselines, "shares": shares}[options.table]()
        return [line for line in lines if not options.only or line.name in options.only]
    extra, own = [line.name for line in more_subjects()], [line.name for line in own_subjects(options.world)]
    names = options.only or dict.fromkeys((*DEFAULT, *own, *extra))
    every = in_world([*subjects(), *more_subjects()], options.world)
    return [line for name in names for line in every if line.name == name]


def show(lab: Lab, options: argparse.Namespace) -> None:
    """Print the table."""
    values = read_values(options.values) if options.values else {}
    if values:
        rollouts = lab.stored_rollouts(values, options.batches)
    else:
        rollouts = list(lab.batches(options.batches, options.seed))
    number = len(rollouts)
    right = torch.cat([batch.correct for batch in rollouts]).float().mean()
    print(f"{lab.setting.title}: {number} batches of {PROMPTS * GROUP_SIZE} rollouts, {right:.3f} right", flush=True)
    draws = torch.cat([torch.ones(1, number), resamplings(number, DRAWS, options.seed).float()])
    gradients = partial(measure, lab=lab, rollouts=rollouts, seed=options.seed)
    uniform = gradients(of_subject(Subject(name="Uniform", method=Uniform()), lab.policy))
    columns = ["direction", "noise", "size", "gain, SGD", "gain, Adam", "one token"]
    if values:
        columns += [f"{what}, {optimiser}" for what in ("share", "by token") for optimiser in OPTIMISERS]
        quarter = Subject(name="A = r - 0.25 mean", method=Uniform(), advantage=GroupMean(share=0.25))
        by_rollout = figures(gradients(of_subject(quarter, lab.policy)), uniform, draws)
    print(f"| method | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")

    def line(name: str, cells: dict[str, Tensor]) -> None:
        if values:
            cells |= {f"by token, {o}": cells[f"gain, {o}"] - by_rollout[f"gain, {o}"] for o in OPTIMISERS}
        print(f"| {name} | {' | '.join(cell(cells[c]) if c in cells else '' for c in columns)} |", flush=True)

    limits: dict[str, Tensor] = {}
    if values:
        resampled = {"Q - V" if c == 1 else f"Q - {c:g} V": of_values(values, c) for c in (1, 0.75, 0.5, 0.25, 0)}
        resampled["Q - b*"] = of_values(values, 1, "best")
        exact = {name: figures(gradients(credit), uniform, draws) for name, credit in resampled.items()}
        for name, cells in exact.items():
            line(name, cells)
        gains = {o: [cells[f"gain, {o}"] for cells in exact.values()] for o in OPTIMISERS}
        limits = {o: max(own, key=lambda gain: float(gain[0])) for o, own in gains.items()}
    for subject in chosen(options):
        cells = figures(gradients(of_subject(subject, lab.policy)), uniform, draws)
        line(
            subject.name,
            cells | {f"share, {o}": (cells[f"gain, {o}"] - 1) / (limit - 1) for o, limit in limits.items()},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=64, help=f"of {PROMPTS} problems, {GROUP_SIZE} rollouts each")
    parser.add_argument("--world", choices=get_args(WorldName), default="chains", help="the problems")
    parser.add_argument("--terms", type=int, default=5, help="of chains")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", choices=["methods", "baselines", "shares"], default="methods")
    parser.add_argument("--values", type=Path, help="the file of benchmarks/credit_values.py of the same world")
    parser.add_argument("--only", nargs="+", default=None, help="lines by their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    with open_lab(setting(options.world, options.terms, options.batches * PROMPTS, options.seed)) as lab:
        show(lab, options)
    print(f"whole run: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
