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

- *direction*: cosine between the mean gradient of the method and that of the expected reward; below 1 it is biased.
- *noise*: the variance of one batch's gradient over the squared norm of its mean.
- *size*: root mean square norm of one batch's gradient, over that of uniform credit.
- *gain, SGD*: first-order gain of expected reward from a step of fixed length along one batch's gradient, over that of
  uniform credit.
- *gain, Adam*: the same for a step whose entries are divided by their root mean square over batches, as Adam's are at a
  given learning rate.
- *one token*: the largest share that a single token has in the sum of |advantage| of its batch, on average.
- *share, SGD* and *share, Adam*, with the file of benchmarks/credit_values.py: ``(gain - 1) / (limit - 1)``. The limit
  is the largest gain among ``Q - V``, ``Q - c V`` and ``Q - b*`` with resampled values: what credit could buy at most.
  In a world of several turns the values are those of turns, all of whose tokens have the same.
- *by token, SGD* and *by token, Adam*, with the same: the gain less that of ``r - mean/4``, which knows no token.

Three tables: `methods`; `baselines`, where each line has its own baseline of the group; and `shares`, every method with
several shares of the group's mean as its baseline.

Every product is of two different batches, so that noise does not count as signal. Intervals are 95 %, a bootstrap over
batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from credit_baselines import BySign, LeftOut, PromptWeights, States, Sum
from credit_programs import of_programs
from credit_quality import sampler
from credit_subjects import GROUP_SIZE, Subject, WorldName, setting, subjects, with_turns
from credit_truth import resamplings
from credit_values import PROMPTS, batches, kept_rollouts, read_values
from torch import Tensor

from grail_lightning.answers import Verifier
from grail_lightning.batch import GradedBatch, RolloutBatch
from grail_lightning.credit import (
    GRAIL,
    AnswerOnly,
    Balanced,
    CreditContext,
    OptimalBaseline,
    Oracle,
    PermutedRewards,
    RandomSubset,
    Shuffled,
    TokenCredit,
    TreeAdvantage,
    Uniform,
)
from grail_lightning.credit.base import token_advantages
from grail_lightning.credit.turns import turn_table
from grail_lightning.engines import HFEngine
from grail_lightning.functional.turns import spread_turns, turn_starts
from grail_lightning.policy import Policy, load_policy
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.advantages import compute_advantages
from grail_lightning.step.continuations import SampledContinuations
from grail_lightning.step.forward import Forward
from grail_lightning.step.options import Objective

DEFAULT = (
    *("Uniform", "GRAIL", "Shuffled(GRAIL)", "AnswerOnly(GRAIL)", "OAR-G", "HighEntropy"),
    *("TreeAdvantage", "TreeAdvantage, permuted rewards", "TreeAdvantage, state=numbers", "PrefixWeights"),
    *("OptimalBaseline", "Resampled, bisection, K=4", "Resampled, everywhere, K=8", "Oracle, right=balanced"),
)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of a method.

    Attributes:
        each: ``[N, P]``: of each batch, over all parameters.
        again: The same from the other half of the resampled values; None for a method without them.
        largest: ``[N]``: the largest share of a token in the sum of |advantage| of its batch.
    """

    each: Tensor
    largest: Tensor
    again: Tensor | None = None


def more() -> list[Subject]:
    """The controls of GRAIL as it is; blame on the first flawed step alone, with and without a bound on weights."""
    return [
        Subject(name="Shuffled(GRAIL)", method=GRAIL(), control=Shuffled()),
        Subject(name="AnswerOnly(GRAIL)", method=GRAIL(), control=AnswerOnly()),
        Subject(name="Oracle, blame alone", method=Oracle()),
        Subject(name="Oracle, blame alone, w_max=5", method=Oracle(w_max=5)),
        Subject(name="Oracle, blame alone, w_max=1", method=Oracle(w_max=1)),
        Subject(name="RandomSubset", method=RandomSubset(0.2)),
    ]


def baselines() -> list[Subject]:
    """The lines of the table of baselines: how much of each reward is subtracted, and what the tree adds to it."""

    def half_tree() -> TreeAdvantage:
        return TreeAdvantage(scale=0.5)

    terms = TreeAdvantage(scale=0.5, advantage=False)
    return [
        *(Subject(name=f"A = r - {c:g} mean", method=Uniform(), baseline=c) for c in (0.75, 0.5, 0.25, 0.0)),
        Subject(name="A = r - pooled energies", method=Uniform(), baseline="energy"),
        Subject(name="A = r, all-right groups kept", method=Uniform(), baseline=0.0, train_equal=True),
        Subject(name="wrong rollouts alone", method=BySign(0, 1)),
        Subject(name="wrong rollouts, right ones with weight 0.1", method=BySign(0.1, 1)),
        Subject(name="prompts weighed as by A = r", method=PromptWeights()),
        Subject(name="OptimalBaseline", method=OptimalBaseline()),
        Subject(name="OptimalBaseline, row left out", method=LeftOut("position")),
        Subject(name="OptimalBaseline, balanced", method=OptimalBaseline(), control=Balanced()),
        Subject(name="one baseline a row, row left out", method=LeftOut("row")),
        Subject(name="baseline of the tree, row left out", method=LeftOut("tree")),
        Subject(name="TreeAdvantage", method=TreeAdvantage()),
        Subject(name="TreeAdvantage, balanced", method=TreeAdvantage(), control=Balanced()),
        *(Subject(name=f"A = r - {c:g} mean + tree/2", method=half_tree(), baseline=c) for c in (1.0, 0.5, 0.25, 0.0)),
        Subject(name="A = r - pooled energies + tree/2", method=half_tree(), baseline="energy"),
        Subject(name="A = r + tree", method=TreeAdvantage(), baseline=0.0),
        Subject(name="A = r + tree/2, permuted", method=PermutedRewards(half_tree()), baseline=0.0),
        *(Subject(name=f"A = r - {c:g} V(s_t-1)", method=States(c)) for c in (1.0, 0.75, 0.5, 0.25)),
        Subject(name="A = V(s_t) - 0.25 V(s_t-1)", method=States(0.25, weight=0.0)),
        *(
            Subject(name=f"A = r - {c:g} b(s_t-1) by energies", method=States(c, energies=True))
            for c in (1.0, 0.75, 0.5)
        ),
        Subject(name="OptimalBaseline + tree/2", method=Sum(OptimalBaseline(), terms)),
        Subject(name="GRAIL", method=GRAIL()),
        Subject(name="GRAIL, balanced", method=GRAIL(), control=Balanced()),
    ]


def shares() -> list[Subject]:
    """Every method with several baselines: the lines of the table of shares."""
    methods = {subject.name: subject for subject in [*subjects(), *more()]}
    names = ("Uniform", "GRAIL", "OAR-G", "OAR-P", "HighEntropy", "RandomSubset", "AdvantageReweighting", "LESS")
    names += ("UCAS", "RLSD", "AttentionRhythm", "TreeAdvantage", "PrefixWeights", "Oracle, right=balanced")
    names += ("Oracle, blame alone, w_max=1",)
    return [
        replace(methods[name], name=f"{name}, c = {c:g}", baseline=c) for name in names for c in (1.0, 0.5, 0.25, 0.0)
    ] + [methods["OptimalBaseline"]]


def gradient(policy: Policy, batch: RolloutBatch, context: CreditContext, advantages: Tensor) -> Tensor:
    """``[P]``: of the sum of advantage ``[B, T]`` times log-probability over all response tokens."""
    forward = Forward(policy, batch, context)
    policy.zero_grad(set_to_none=True)
    for micro in forward.cut(advantages.any(1).nonzero().flatten()):
        (advantages[micro.rows] * padded(forward(micro).stats.logprobs, batch)).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def padded(logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    """The columns of the batch; a micro-batch has those of its longest row."""
    return torch.nn.functional.pad(logprobs, (0, batch.response_mask.shape[1] - logprobs.shape[1]))


def measure(
    subject: Subject,
    policy: Policy,
    rollouts: list[GradedBatch],
    source: Callable[[], SampledContinuations],
    budget: int,
    seed: int,
) -> Gradients:
    """The gradients of a method on all batches."""
    assert isinstance(subject.method, TokenCredit)
    each, largest = [], []
    for k, graded in enumerate(rollouts):
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit", k))
        context = CreditContext(step=0, generator=generator, token_budget=budget, continuations=source())
        objective = Objective(baseline=subject.baseline, train_equal=subject.train_equal)
        batch = compute_advantages(graded, GROUP_SIZE, objective, policy, context)
        weights = subject.method(policy, batch, context)
        if subject.control is not None:
            weights = subject.control(weights, batch, context)
        advantages = token_advantages(batch.advantages, weights)
        largest.append(advantages.abs().max() / advantages.abs().sum())
        each.append(gradient(policy, batch, context, advantages))
    return Gradients(each=torch.stack(each), largest=torch.stack(largest))


def of_pairs(products: Tensor, draws: Tensor) -> Tensor:
    """``[D]``: the mean product of two different batches ``[N, N]``, for each draw of weights ``[D, N]``."""
    off = products - products.diag().diag()
    number = draws.sum(1)
    return ((draws @ off) * draws).sum(1) / (number.square() - draws.square().sum(1))


def figures(ours: Gradients, uniform: Gradients, draws: Tensor) -> dict[str, Tensor]:
    """The columns, ``[D]`` each; the first draw is the sample itself."""

    def mean(values: Tensor) -> Tensor:
        return (draws @ values) / draws.sum(1)

    found = {}
    for name, gradients in (("ours", ours), ("uniform", uniform)):
        # The noise of resampled values is independent in the two halves, so that it drops out of their product. Adam's
        # scale keeps the noise of their mean.
        one, other = (gradients.each, gradients.each if gradients.again is None else gradients.again)
        power = (one * other).sum(1)
        one = (one + other) / 2
        rms = one.square().mean(0).sqrt().clamp(min=1e-12)
        found[name] = {
            "signal": of_pairs(one @ one.T, draws),
            "power": mean(power),
            "along": of_pairs(one @ uniform.each.T, draws),
            "adam": of_pairs((one / rms) @ uniform.each.T, draws),
        }
    mine, base = found["ours"], found["uniform"]
    return {
        "direction": mine["along"] / (mine["signal"] * base["signal"]).clamp(min=1e-30).sqrt(),
        "noise": mine["power"] / mine["signal"] - 1,
        "size": (mine["power"] / base["power"]).sqrt(),
        "gain, SGD": (mine["along"] / mine["power"].sqrt()) / (base["along"] / base["power"].sqrt()),
        "gain, Adam": mine["adam"] / base["adam"],
        "one token": mean(ours.largest),
    }


def share(gain: Tensor, limit: Tensor) -> Tensor:
    """``[D]``: the part of the largest possible gain over uniform credit."""
    return (gain - 1) / (limit - 1)


def cell(values: Tensor) -> str:
    """The figure and half the width of its interval."""
    low, high = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    digits = 3 if values[0].abs() < 1 else 2
    return f"{values[0]:.{digits}f} ±{(high - low) / 2:.{digits}f}"


def resampled_subjects(values: dict[str, np.ndarray]) -> dict[str, Callable[[int, int, GradedBatch], Tensor]]:
    """Token advantages ``[B, T]`` from resampled values, by half, number of the batch, and batch."""

    def q_and_v(half: int, number: int, batch: GradedBatch, name: str = "value") -> tuple[Tensor, Tensor]:
        width = batch.response_mask.shape[1]
        before = torch.from_numpy(values[name][number, :, :width, half]).float()
        value = torch.from_numpy(values["value"][number, :, :width, half]).float()
        # A token that is no choice leaves the value as it is: it takes that of the next choice, and Q is the next V.
        after = torch.empty_like(value)
        q = batch.rewards.clone().float()
        for t in range(width - 1, -1, -1):
            after[:, t] = q
            q = torch.where(value[:, t].isnan(), q, value[:, t])
        before = torch.where(before.isnan(), after, before)
        if batch.turn is None:
            return after, before
        turns = turn_table(batch)
        places = turn_starts(turns.numbers, turns.exists.shape[1]).clamp(max=width - 1)
        first, then = (spread_turns(x.gather(1, places), turns.numbers) for x in (after, before))
        return first, then

    def less(c: float) -> Callable[[int, int, GradedBatch], Tensor]:
        def advantages(half: int, number: int, batch: GradedBatch) -> Tensor:
            q, v = q_and_v(half, number, batch)
            return (q - c * v) * batch.response_mask

        return advantages

    def least_noise(half: int, number: int, batch: GradedBatch) -> Tensor:
        q, best = q_and_v(half, number, batch, "best")
        return (q - best) * batch.response_mask

    shares = {f"Q - {c:g} V" if c != 1 else "Q - V": less(c) for c in (1.0, 0.75, 0.5, 0.25, 0.0)}
    return shares | {"Q - b*": least_noise}


def measure_values(
    advantages: Callable[[int, int, GradedBatch], Tensor], policy: Policy, rollouts: list[GradedBatch], budget: int
) -> Gradients:
    """The gradients of resampled values on all batches, from each half."""
    halves: tuple[list[Tensor], list[Tensor]] = [], []
    largest = []
    for k, graded in enumerate(rollouts):
        batch = graded.with_advantages(torch.zeros(len(graded)))
        context = CreditContext(step=0, generator=torch.Generator(), token_budget=budget)
        for half in (0, 1):
            credit = advantages(half, k, graded)
            halves[half].append(gradient(policy, batch, context, credit))
        largest.append(credit.abs().max() / credit.abs().sum())
    return Gradients(each=torch.stack(halves[0]), again=torch.stack(halves[1]), largest=torch.stack(largest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=64, help=f"of {PROMPTS} problems, {GROUP_SIZE} rollouts each")
    parser.add_argument("--world", choices=get_args(WorldName), default="chains", help="the problems")
    parser.add_argument("--terms", type=int, default=5, help="of chains")
    parser.add_argument("--policy", help="a folder, such as a run's export; default the packaged one of the world")
    parser.add_argument("--token-budget", type=int, default=1024, help="padded tokens of a forward pass")
    parser.add_argument("--draws", type=int, default=2000, help="of the bootstrap over batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", choices=["methods", "baselines", "shares"], default="methods")
    parser.add_argument("--values", type=Path, help="the file of benchmarks/credit_values.py of the same world")
    parser.add_argument("--only", nargs="+", default=None, help="lines by their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    where_from = setting(options.world, options.terms, options.batches * PROMPTS, options.seed)
    policy = load_policy(options.policy or where_from.policy).eval()
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    every = [*subjects(), *more()]
    of_world = {"search": with_turns, "charts": with_turns, "code": of_programs}.get(options.world, list)
    every = of_world(every)
    lines = {"methods": every, "baselines": baselines(), "shares": shares()}[options.table]
    if options.table == "methods":
        names = options.only or [
            *DEFAULT,
            *(s.name for s in of_world([])),
            *(s.name for s in more() if s.name not in DEFAULT),
        ]
        lines = [line for name in names for line in every if line.name == name]
    elif options.only:
        lines = [line for line in lines if line.name in options.only]
    with Verifier() as verifier:
        if options.values is None:
            values = None
            rollouts = list(batches(policy, engine, verifier, where_from, options.batches, options.seed))
        else:
            values = read_values(options.values)
            rollouts = kept_rollouts(values, where_from, policy, verifier, options.batches)
        number = len(rollouts)
        draws = torch.cat([torch.ones(1, number), resamplings(number, options.draws, options.seed).float()])
        right = torch.cat([batch.correct for batch in rollouts]).float().mean()
        print(f"{where_from.title}: {number} batches of {PROMPTS * GROUP_SIZE} rollouts, {right:.3f} right", flush=True)

        def source() -> SampledContinuations:
            return SampledContinuations(sampler(policy, engine, verifier, where_from), step=0)

        grpo = Subject(name="Uniform", method=Uniform())
        uniform = measure(grpo, policy, rollouts, source, options.token_budget, options.seed)
        columns = ["direction", "noise", "size", "gain, SGD", "gain, Adam", "one token"]
        limits: dict[str, Tensor] = {}
        if values is not None:
            columns += ["share, SGD", "share, Adam", "by token, SGD", "by token, Adam"]
            whole = Subject(name="A = r - 0.25 mean", method=Uniform(), baseline=0.25)
            lower = measure(whole, policy, rollouts, source, options.token_budget, options.seed)
            by_rollout = figures(lower, uniform, draws)
        print(f"| method | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")

        def line(name: str, found: dict[str, Tensor]) -> None:
            if values is not None:
                found |= {f"by token, {o}": found[f"gain, {o}"] - by_rollout[f"gain, {o}"] for o in ("SGD", "Adam")}
            print(f"| {name} | {' | '.join(cell(found[c]) if c in found else '' for c in columns)} |", flush=True)

        if values is not None:
            resampled = {
                name: figures(measure_values(advantages, policy, rollouts, options.token_budget), uniform, draws)
                for name, advantages in resampled_subjects(values).items()
            }
            for name, found in resampled.items():
                line(name, found)
            for optimiser in ("SGD", "Adam"):
                best = max(resampled.values(), key=lambda found: float(found[f"gain, {optimiser}"][0]))
                limits[optimiser] = best[f"gain, {optimiser}"]
        for subject in lines:
            ours = measure(subject, policy, rollouts, source, options.token_budget, options.seed)
            found = figures(ours, uniform, draws)
            shares_of = {f"share, {o}": share(found[f"gain, {o}"], limit) for o, limit in limits.items()}
            line(subject.name, found | shares_of)
    print(f"whole run: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
