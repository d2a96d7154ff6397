"""The quality of credit on labelled rollouts: every method, simple scorers, control experiments and the truth.

    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py

Samples responses of the packaged policy to arithmetic test problems as training would, computes each method's weights
in batches of 256 rollouts, and prints one table; docs/credit_quality.md explains its columns and reads it. The task
labels every line as sound, slip (wrong at random), misconception (wrong systematically) or inherited (right, but
computed from a wrong result).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from credit_truth import (  # fmt: skip
    ERRORS,
    Estimate,
    Resampling,
    World,
    forks,
    label_lines,
    over_prompts,
    rank_correlation,
    regions,
    resamplings,
)
from prime_quality import TrainedPRIME
from torch import Tensor
from tree_controls import leaves_tree

from grail_lightning.answers import Verifier
from grail_lightning.batch import RolloutBatch, Sampling
from grail_lightning.credit import (
    GRAIL,
    LESS,
    RLSD,
    UCAS,
    AdvantageReweighting,
    AnswerOnly,
    AttentionRhythm,
    BilevelOptions,
    CreditContext,
    CreditControl,
    HighEntropy,
    OARGradient,
    OARPerturbation,
    OptimalBaseline,
    Oracle,
    PermutedRewards,
    PrefixWeights,
    Random,
    Resampled,
    SaliencyOptions,
    Shuffled,
    TokenCredit,
    TreeAdvantage,
    Uniform,
)
from grail_lightning.credit.base import TokenWeights
from grail_lightning.credit.continuations import Continuations, Continued, Place
from grail_lightning.credit.forward import entropies, logprobs
from grail_lightning.credit.perturbation import perturbation_scores
from grail_lightning.data import ArithmeticData
from grail_lightning.engines import HFEngine
from grail_lightning.functional import group_advantages
from grail_lightning.functional.attribution import pairwise_auroc
from grail_lightning.grading.grade import grade_and_locate
from grail_lightning.policy import Policy, load_policy
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.advantages import token_advantages
from grail_lightning.step.continuations import SampledContinuations
from grail_lightning.step.sampler import Sampler

GROUP_SIZE = 8
PROMPTS_PER_BATCH = 32
SAMPLING = Sampling(max_response_length=64)

Scorer = Callable[[Policy, RolloutBatch, CreditContext], Tensor]
Split = Literal["train", "test"]
Sums = tuple[Tensor, Tensor]
"""What the rows of each prompt add up to, and of how many: ``[G]`` each."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A line of the table.

    Attributes:
        name: The name in the first cell.
        method: A credit method, or a bare score ``[B, T]`` of each token.
        control: The control experiment that wraps the method.
        by: The quantity that ranks tokens: the score if the weights increase with it, else the weights.
    """

    name: str
    method: TokenCredit | Scorer
    control: CreditControl | None = None
    by: Literal["score", "weight"] = "weight"


def negative_logprob(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return -logprobs(policy, batch, context, torch.arange(len(batch)))


def entropy(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return entropies(policy, batch, context, torch.arange(len(batch)))


def position(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return torch.arange(batch.response_mask.shape[1]).float().expand(batch.response_mask.shape)


def pad_effect(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """The drop in the mean log-likelihood of the response's own answer if a token is replaced by the pad token."""
    return perturbation_scores(
        policy,
        batch,
        (batch.advantages != 0).nonzero().flatten(),
        token_budget=context.token_budget,
        distribution="answer_joint",
        temperature=context.temperature,
    )


PAD_EFFECT = Subject(name="pad effect on the answer (a)", method=pad_effect, by="score")


def subjects() -> list[Subject]:
    """All lines of the table except those of the truth."""

    def grail(gate: Literal["negative", "all"], **options: Any) -> GRAIL:
        return GRAIL(gate=gate, saliency=SaliencyOptions(**options))

    as_in_grail = OARGradient(
        scope="response",
        alignment="predictor",
        product="noisy",
        bilevel=BilevelOptions(interpolate=False, eps=1e-12),
    )
    return [
        Subject(name="-log p", method=negative_logprob, by="score"),
        Subject(name="entropy", method=entropy, by="score"),
        Subject(name="position", method=position, by="score"),
        Subject(name="the row leaves the tree", method=leaves_tree, by="score"),
        Subject(name="Uniform", method=Uniform()),
        Subject(name="GRAIL", method=grail("negative"), by="score"),
        Subject(name="GRAIL, gate=all", method=grail("all"), by="score"),
        Subject(name="GRAIL, token", method=grail("negative", alignment="token"), by="score"),
        Subject(name="GRAIL, token, gate=all", method=grail("all", alignment="token"), by="score"),
        Subject(name="GRAIL, leaf=middle, gate=all", method=grail("all", leaf="middle"), by="score"),
        Subject(name="GRAIL, leaf=last, gate=all", method=grail("all", leaf="last"), by="score"),
        Subject(name="Random(GRAIL, gate=all)", method=grail("all"), control=Random()),
        Subject(name="Shuffled(GRAIL, gate=all)", method=grail("all"), control=Shuffled()),
        Subject(name="AnswerOnly(GRAIL, gate=all)", method=grail("all"), control=AnswerOnly()),
        Subject(name="OAR-G", method=OARGradient(), by="score"),
        Subject(name="OAR-G as in GRAIL's code", method=as_in_grail, by="score"),
        Subject(name="OAR-P", method=OARPerturbation(), by="score"),
        Subject(name="HighEntropy", method=HighEntropy()),
        Subject(name="AdvantageReweighting", method=AdvantageReweighting()),
        Subject(name="LESS", method=LESS()),
        Subject(name="UCAS", method=UCAS()),
        Subject(name="RLSD", method=RLSD()),
        Subject(name="AttentionRhythm", method=AttentionRhythm(gate="all")),
        Subject(name="AttentionRhythm, pre_plan", method=AttentionRhythm("pre_plan", gate="all"), by="score"),
        Subject(name="AttentionRhythm, anchor", method=AttentionRhythm("anchor", gate="all"), by="score"),
        *tree_subjects(),
    ]


def tree_subjects() -> list[Subject]:
    """The methods of the group's prefix tree, beside themselves with the rewards permuted within each group."""

    def tree(**options: Any) -> TreeAdvantage:
        return TreeAdvantage(**options)

    def resampled(number: int, search: Any) -> Resampled:
        return Resampled(number, search=search, outcome="correctness", budget=10**9)

    return [
        Subject(name="TreeAdvantage", method=tree()),
        Subject(name="TreeAdvantage, permuted rewards", method=PermutedRewards(tree())),
        Subject(name="TreeAdvantage, permuted and mirrored rewards", method=PermutedRewards(tree(), mirrored=True)),
        Subject(name="TreeAdvantage, own_row=false", method=tree(own_row=False)),
        Subject(name="TreeAdvantage, own_row=false, permuted rewards", method=PermutedRewards(tree(own_row=False))),
        Subject(name="TreeAdvantage, state=numbers", method=tree(state="numbers")),
        Subject(name="TreeAdvantage, state=numbers, own_row=false", method=tree(state="numbers", own_row=False)),
        Subject(name="TreeAdvantage, state=numbers, permuted rewards", method=PermutedRewards(tree(state="numbers"))),
        Subject(name="PrefixWeights", method=PrefixWeights()),
        *(
            Subject(name=f"Resampled, {search}, K={number}", method=resampled(number, search))
            for search, number in (("bisection", 4), ("bisection", 8), ("everywhere", 8), ("everywhere", 32))
        ),
        Subject(name="OptimalBaseline", method=OptimalBaseline()),
        Subject(name="Oracle, right=balanced", method=Oracle("balanced")),
    ]


PRIME_BATCHES = 16


def prime_subjects(engine: HFEngine, verifier: Verifier, seed: int) -> list[Subject]:
    """PRIME with its reward model trained on training problems, beside the same with permuted outcomes."""

    def rollouts(policy: Policy) -> Iterator[RolloutBatch]:
        engine.update_weights(policy)
        for number in range(PRIME_BATCHES):
            yield sample(policy, engine, verifier, PROMPTS_PER_BATCH, derive_seed(seed, "PRIME", number), "train")

    def trained(**options: Any) -> TrainedPRIME:
        return TrainedPRIME(rollouts, **options)

    return [
        Subject(name="PRIME", method=trained()),
        Subject(name="PRIME, permuted", method=trained(permuted=True)),
        Subject(name="PRIME, token reward", method=trained().token_reward, by="score"),
        Subject(name="PRIME, token reward, permuted", method=trained(permuted=True).token_reward, by="score"),
    ]


def sample(
    policy: Policy, engine: HFEngine, verifier: Verifier, num_prompts: int, seed: int, split: Split = "test"
) -> RolloutBatch:
    """Graded responses to problems, with the advantages of training: rewards less the mean of the group."""
    (problems,) = ArithmeticData(num_train=num_prompts, num_test=num_prompts, seed=seed).load(split)
    batch = engine.generate(list(problems.prompts), GROUP_SIZE, SAMPLING, derive_seed(seed, "rollouts"))
    graded = grade_and_locate(batch, verifier, policy.tokenizer)
    return graded.with_advantages(group_advantages(graded.rewards, GROUP_SIZE))


# --- running the methods ----------------------------------------------------------------------------------------------


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


class Counted(SampledContinuations):
    """Continuations that count what they draw."""

    places, continuations, tokens = 0, 0, 0

    def draw(
        self, batch: RolloutBatch, places: Sequence[Place], number: int, budget: int
    ) -> tuple[list[Continued | None], int]:
        found, tokens = super().draw(batch, places, number, budget)
        drawn = sum(one is not None for one in found)
        self.places, self.continuations = self.places + drawn, self.continuations + drawn * number
        self.tokens += tokens
        return found, tokens


def run(
    subject: Subject,
    policy: Policy,
    batch: RolloutBatch,
    token_budget: int,
    seed: int,
    source: Continuations | None = None,
) -> Credit:
    """Apply a subject to all rollouts, in batches as large as the published ones."""
    ranks, weights = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    seconds = []
    bare = not isinstance(subject.method, TokenCredit)
    for rows in torch.split(torch.arange(len(batch)), PROMPTS_PER_BATCH * GROUP_SIZE):
        piece = batch.select(rows)
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit"))
        context = CreditContext(step=0, generator=generator, token_budget=token_budget, continuations=source)
        start = time.process_time()
        found = subject.method(policy, piece, context)
        if isinstance(found, TokenWeights) and subject.control is not None:
            found = subject.control(found, piece, context)
        seconds.append((time.process_time() - start) / len(piece) * 1000)
        columns = piece.response_mask.shape[1]
        score = found.scores if isinstance(found, TokenWeights) else found
        if isinstance(found, TokenWeights):
            weights[rows, :columns] = effective(found, piece)
        chosen = score if subject.by == "score" else weights[rows, :columns]
        assert chosen is not None
        ranks[rows, :columns] = chosen.to(ranks.dtype)
    return Credit(ranks=ranks, weights=None if bare else weights, seconds=statistics.median(seconds))


def effective(found: TokenWeights, batch: RolloutBatch) -> Tensor:
    """``[B, T]``: each token's advantage over its rollout's; zero on rows without one."""
    total = token_advantages(batch.advantages, found)
    return torch.where(batch.advantages[:, None] != 0, total / batch.advantages[:, None], 0)


# --- the table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    *(f"in rollout: {error}" for error in ERRORS),
    *(f"at fork: {error}" for error in ERRORS),
    *(f"weight: {kind}" for kind in ("flawed", "sound", "inherited", "filler", "answer")),
    *(f"rho ({truth}): {outcome}" for truth in "ab" for outcome in ("wrong", "right")),
)


def by_prompt(rows: Tensor) -> Sums:
    """Sums over the rows ``[B]`` of each prompt that have a value."""
    groups = rows.double().reshape(-1, GROUP_SIZE)
    return groups.nansum(1), (~groups.isnan()).double().sum(1)


def where(rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, rows, torch.nan)


def detection(lines: Tensor, world: World) -> dict[str, Sums]:
    """Flawed against sound lines of the same rollout."""
    kind, measured = world.lines.kind, world.wrong[:, None] & ~lines.isnan()
    return {
        f"in rollout: {error}": by_prompt(pairwise_auroc(lines, kind[error] & measured, kind["sound"] & measured))
        for error in ERRORS
    }


def agreement(ranks: Tensor, lines: Tensor, world: World) -> dict[str, Sums]:
    """Rank correlation with both truths, in wrong and in right rollouts."""
    earned = world.earned.mean(0)
    with_effect = rank_correlation(ranks, world.effect, world.reasoning)
    with_gain = rank_correlation(lines, earned, world.lines.known & ~earned.isnan())
    return {
        "rho (a): wrong": by_prompt(where(with_effect, world.wrong)),
        "rho (a): right": by_prompt(where(with_effect, world.right)),
        "rho (b): wrong": by_prompt(where(with_gain, world.wrong)),
        "rho (b): right": by_prompt(where(with_gain, world.right)),
    }


def placement(weights: Tensor, world: World) -> dict[str, Sums]:
    """Mean weight of the tokens of each kind in wrong rollouts."""
    columns = {}
    for name, mask in world.kinds.items():
        chosen = (mask & world.wrong[:, None]).double()
        totals, counts = (x.sum(1).reshape(-1, GROUP_SIZE).sum(1) for x in (weights * chosen, chosen))
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
            "rho (b): wrong": by_prompt(where(halves, world.wrong)),
            "rho (b): right": by_prompt(where(halves, world.right)),
        }
    )


def table_row(name: str, by: str, columns: dict[str, Sums], seconds: float, draws: Tensor) -> str:
    none = Estimate(float("nan"), float("nan"), float("nan"))
    cells = [str(over_prompts(*columns[c], draws) if c in columns else none) for c in COLUMNS]
    return "| " + " | ".join([name, by, *cells, f"{seconds:.2f}"]) + " |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256, help=f"test problems, {GROUP_SIZE} rollouts each")
    parser.add_argument("--counterfactual-prompts", type=int, default=64, help="of those, resampled at each line")
    parser.add_argument("--samples", type=int, default=32, help="continuations of each beginning; even")
    parser.add_argument("--counterfactual-seconds", type=float, default=600, help="begin no more prompts after that")
    parser.add_argument("--token-budget", type=int, default=4096, help="padded tokens of a forward pass")
    parser.add_argument("--draws", type=int, default=2000, help="of the bootstrap over prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="lines whose name contains one of these; default all")
    return parser.parse_args()


def observe(policy: Policy, options: argparse.Namespace) -> tuple[World, Credit, float]:
    """Rollouts with both truths about them; the pad effect as a subject; seconds for resampling 1,000 rollouts."""
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    with Verifier() as verifier:
        start = time.process_time()
        batch = sample(policy, engine, verifier, options.prompts, options.seed)
        print(
            f"{options.prompts} prompts, {len(batch)} rollouts, sampled in {time.process_time() - start:.1f} s",
            flush=True,
        )
        resampling = Resampling(
            policy=policy,
            engine=engine,
            verifier=verifier,
            sampling=SAMPLING,
            num_samples=options.samples,
            seed=derive_seed(options.seed, "counterfactual"),
        )
        lines, boxed = label_lines(batch, policy), batch.answer.whole.any(1)
        rows = (boxed & (batch.advantages != 0)).nonzero().flatten()
        rows = rows[rows < options.counterfactual_prompts * GROUP_SIZE]
        start = time.process_time()
        gains, done = resampling.gains_within(batch, lines, rows, GROUP_SIZE, options.counterfactual_seconds)
        seconds = time.process_time() - start
    measured = int((~gains[0].isnan()).any(1).sum())
    print(
        f"(b): {measured} rollouts of {done} prompts with both outcomes, {options.samples} samples, {seconds:.0f} s",
        flush=True,
    )
    effect = run(PAD_EFFECT, policy, batch, options.token_budget, options.seed)
    kinds, reasoning = regions(batch, policy)
    wrong = boxed & (batch.advantages < 0)
    world = World(
        batch=batch,
        lines=lines,
        kinds=kinds,
        reasoning=reasoning,
        forks={error: forks(batch, lines, wrong, error, GROUP_SIZE) for error in ERRORS},
        wrong=wrong,
        right=boxed & (batch.advantages > 0),
        effect=effect.ranks,
        gains=gains,
    )
    return world, effect, seconds / max(measured, 1) * 1000


def describe(world: World, policy: Policy) -> None:
    """The numbers of rollouts behind the columns."""
    kind, wrong = world.lines.kind, world.wrong[:, None]
    print(f"{int(world.wrong.sum())} wrong and {int(world.right.sum())} right rollouts of groups with both, boxed")
    for error in ERRORS:
        rows = (kind[error] & wrong).any(1) & (kind["sound"] & wrong).any(1)
        pairs = world.forks[error]
        prompts = len(set((pairs.row[0] // GROUP_SIZE).tolist()))
        token, times = Counter(world.batch.response_ids[pairs.row[1], pairs.token].tolist()).most_common(1)[0]
        print(
            f"{error}: beside a sound line in {int(rows.sum())} rollouts; {len(pairs.line)} forks, {prompts} prompts; "
            f"the sound token is {policy.tokenizer.decode([token])!r} at {times}"
        )


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    policy = load_policy("arithmetic").eval()
    world, effect, seconds = observe(policy, options)
    describe(world, policy)
    draws = resamplings(options.prompts, options.draws, options.seed)
    print("| " + " | ".join(["method", "by", *COLUMNS, "s / 1,000"]) + " |")
    print("|---|---|" + "--:|" * (len(COLUMNS) + 1))
    print(table_row("resampled gain (b)", "score", gain_columns(world), seconds, draws))
    print(table_row(PAD_EFFECT.name, "score", credit_columns(effect, world), effect.seconds, draws), flush=True)
    engine, extra = HFEngine(cache_tokens=50_000), []
    with Verifier() as verifier:
        every = [*subjects(), *prime_subjects(engine, verifier, options.seed)]
        for subject in (s for s in every if any(part in s.name for part in options.only)):
            how = {"group_size": GROUP_SIZE, "sampling": SAMPLING, "clock": PhaseClock(policy.device), "rank": 0}
            source = Counted(Sampler(policy=policy, engine=engine, verifier=verifier, **how), step=0)
            credit = run(subject, policy, world.batch, options.token_budget, options.seed, source)
            print(table_row(subject.name, subject.by, credit_columns(credit, world), credit.seconds, draws), flush=True)
            if isinstance(subject.method, TrainedPRIME):
                extra.append(
                    f"{subject.name}: loss and accuracy of each batch before its step: {subject.method.figures}"
                )
            if source.tokens:
                extra.append(
                    f"{subject.name}: {source.continuations} continuations from {source.places} places, "
                    f"{source.tokens} tokens, beside {int(world.batch.response_mask.sum())} of the rollouts"
                )
    print("\n".join(extra))
    print(f"whole run: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
