"""What each credit method makes of the policy gradient: its bias, its noise, and the gain of a step.

    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py
    OMP_NUM_THREADS=1 python benchmarks/credit_gradients.py --world words --batches 32

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

Every product is of two different batches, so that noise does not count as signal. Intervals are 95 %, a bootstrap over
batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from credit_quality import respond, sampler
from credit_subjects import GROUP_SIZE, Setting, Subject, setting, subjects
from credit_truth import resamplings
from torch import Tensor

from grail_lightning.answers import Verifier
from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import GRAIL, AnswerOnly, CreditContext, Oracle, Shuffled, TokenCredit, TokenWeights
from grail_lightning.engines import HFEngine
from grail_lightning.policy import Policy, load_policy
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.advantages import token_advantages
from grail_lightning.step.forward import Forward
from grail_lightning.step.sampler import SampledContinuations

PROMPTS = 16  # A batch of the quickstart.
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
        largest: ``[N]``: the largest share of a token in the sum of |advantage| of its batch.
    """

    each: Tensor
    largest: Tensor


def more() -> list[Subject]:
    """The controls of GRAIL as it is; blame on the first flawed step alone, with and without a bound on weights."""
    return [
        Subject(name="Shuffled(GRAIL)", method=GRAIL(), control=Shuffled()),
        Subject(name="AnswerOnly(GRAIL)", method=GRAIL(), control=AnswerOnly()),
        Subject(name="Oracle, blame alone", method=Oracle()),
        Subject(name="Oracle, blame alone, w_max=5", method=Oracle(w_max=5)),
        Subject(name="Oracle, blame alone, w_max=1", method=Oracle(w_max=1)),
    ]


def batches(
    policy: Policy, engine: HFEngine, verifier: Verifier, where_from: Setting, number: int, seed: int
) -> Iterator[RolloutBatch]:
    """Graded rollouts of different training problems."""
    (problems,) = where_from.data.load("train")
    for k in range(number):
        prompts = problems.prompts[k * PROMPTS : (k + 1) * PROMPTS]
        yield respond(policy, engine, verifier, prompts, where_from, derive_seed(seed, "batch", k))


def gradient(policy: Policy, batch: RolloutBatch, context: CreditContext, weights: TokenWeights) -> Tensor:
    """``[P]``: of the sum of advantage times log-probability over all response tokens."""
    forward, advantages = Forward(policy, batch, context), token_advantages(batch.advantages, weights)
    policy.zero_grad(set_to_none=True)
    for micro in forward.cut(torch.arange(len(batch))):
        (advantages[micro.rows] * padded(forward(micro).stats.logprobs, batch)).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def padded(logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    """The columns of the batch; a micro-batch has those of its longest row."""
    return torch.nn.functional.pad(logprobs, (0, batch.response_mask.shape[1] - logprobs.shape[1]))


def measure(
    subject: Subject,
    policy: Policy,
    rollouts: list[RolloutBatch],
    source: Callable[[], SampledContinuations],
    budget: int,
    seed: int,
) -> Gradients:
    """The gradients of a method on all batches."""
    assert isinstance(subject.method, TokenCredit)
    each, largest = [], []
    for k, batch in enumerate(rollouts):
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit", k))
        context = CreditContext(step=0, generator=generator, token_budget=budget, continuations=source())
        weights = subject.method(policy, batch, context)
        if subject.control is not None:
            weights = subject.control(weights, batch, context)
        sizes = token_advantages(batch.advantages, weights).abs()
        largest.append(sizes.max() / sizes.sum())
        each.append(gradient(policy, batch, context, weights))
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
    for name, one in (("ours", ours.each), ("uniform", uniform.each)):
        rms = one.square().mean(0).sqrt().clamp(min=1e-12)
        found[name] = {
            "signal": of_pairs(one @ one.T, draws),
            "power": mean(one.square().sum(1)),
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


def cell(values: Tensor) -> str:
    """The figure and half the width of its interval."""
    low, high = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    digits = 3 if values[0].abs() < 1 else 2
    return f"{values[0]:.{digits}f} ±{(high - low) / 2:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=64, help=f"of {PROMPTS} problems, {GROUP_SIZE} rollouts each")
    parser.add_argument("--world", choices=["chains", "words"], default="chains", help="what the problems are")
    parser.add_argument("--terms", type=int, default=5, help="of chains")
    parser.add_argument("--policy", help="a folder, such as a run's export; default the packaged one of the world")
    parser.add_argument("--token-budget", type=int, default=1024, help="padded tokens of a forward pass")
    parser.add_argument("--draws", type=int, default=2000, help="of the bootstrap over batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=None, help="methods by their names in credit_quality.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    where_from = setting(options.world, options.terms, options.batches * PROMPTS, options.seed)
    policy = load_policy(options.policy or where_from.policy).eval()
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    known = {subject.name: subject for subject in [*subjects(), *more()]}
    wanted = options.only or [*DEFAULT, *(s.name for s in more() if s.name not in DEFAULT)]
    draws = torch.cat(
        [torch.ones(1, options.batches), resamplings(options.batches, options.draws, options.seed).float()]
    )
    with Verifier() as verifier:
        rollouts = list(batches(policy, engine, verifier, where_from, options.batches, options.seed))
        right = torch.cat([batch.correct for batch in rollouts]).float().mean()
        print(
            f"{where_from.title}: {options.batches} batches of {PROMPTS * GROUP_SIZE} rollouts, {right:.3f} right",
            flush=True,
        )

        def source() -> SampledContinuations:
            return SampledContinuations(sampler(policy, engine, verifier, where_from), step=0)

        uniform = measure(known["Uniform"], policy, rollouts, source, options.token_budget, options.seed)
        columns = ("direction", "noise", "size", "gain, SGD", "gain, Adam", "one token")
        print(f"| method | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
        for name in wanted:
            ours = uniform
            if name != "Uniform":
                ours = measure(known[name], policy, rollouts, source, options.token_budget, options.seed)
            found = figures(ours, uniform, draws)
            print(f"| {name} | {' | '.join(cell(found[column]) for column in columns)} |", flush=True)
    print(f"whole run: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
