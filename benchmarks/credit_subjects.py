"""The labelled worlds and the lines of the table of benchmarks/credit_quality.py: methods, scorers and controls.

This module belongs to credit_quality.py and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from grail_lightning.batch import RolloutBatch, SampledBatch, Sampling
from grail_lightning.credit import (
    GRAIL,
    IGPO,
    LESS,
    PRIME,
    RLSD,
    UCAS,
    AdvantageReweighting,
    AnswerOnly,
    AttentionRhythm,
    BilevelOptions,
    CreditContext,
    CreditControl,
    CriticSearch,
    GiGPO,
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
    SpanScores,
    TokenCredit,
    TreeAdvantage,
    TurnRewards,
    Uniform,
)
from grail_lightning.credit.base import TokenWeights
from grail_lightning.credit.measure import entropies, logprobs
from grail_lightning.data import ArithmeticData, ChartsData, CodeData, PromptData, SearchData, WordProblemData
from grail_lightning.engines import HFEngine
from grail_lightning.engines.continued import ContinuedTurns
from grail_lightning.engines.turns import SampledTurn, TurnRequest, TurnSampler
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import response_nodes
from grail_lightning.policy.reference import Reference
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.episodes import play
from grail_lightning.step.second_model import TrainedModel
from grail_lightning.tasks import ProblemSpace, SearchSpace, WordProblemSpace, WordProblemTask
from grail_lightning.tasks.base import Prompt

WorldName = Literal["chains", "words", "search", "code", "charts"]
GROUP_SIZE = 8  # Unless it is given.
CACHE_TOKENS = 200_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where rollouts come from."""

    title: str
    policy: str
    data: PromptData
    sampling: Sampling
    group_size: int = GROUP_SIZE


def setting(world: WorldName, terms: int, num_prompts: int, seed: int) -> Setting:
    """A world with its policy and its test problems; `terms` is the number of terms of a chain."""
    if world == "words":
        space = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
        data: PromptData = WordProblemData(num_test=num_prompts, problems=space, seed=seed, task=WordProblemTask())
        return Setting(title="word problems", policy="words", data=data, sampling=Sampling(max_response_length=64))
    if world == "search":
        questions = SearchSpace(min_hops=2, max_hops=3)
        data = SearchData(num_test=num_prompts, problems=questions, seed=seed)
        return Setting(title="search", policy="search", data=data, sampling=Sampling(max_response_length=64))
    if world == "charts":
        data = ChartsData(num_test=num_prompts, seed=seed)
        return Setting(title="charts", policy="charts", data=data, sampling=Sampling(max_response_length=48))
    if world == "code":
        data = CodeData(num_test=num_prompts, seed=seed)
        return Setting(title="functions", policy="code", data=data, sampling=Sampling(max_response_length=80))
    # The quickstart's policy knows five terms alone, `chains` 5 to 10, `long_chains` 15 to 20.
    return Setting(
        title=f"chains of {terms} terms",
        policy="arithmetic" if terms == 5 else "chains" if terms <= 10 else "long_chains",
        data=ArithmeticData(num_test=num_prompts, problems=ProblemSpace(terms, terms), seed=seed),
        sampling=Sampling(max_response_length=max(64, 11 * terms)),
    )


# --- rollouts of several turns, of which some turns are given ---

Turns = tuple[tuple[int, ...], ...]
"""The ids that the policy sampled in each turn."""


class GivenTurns(TurnSampler):
    """Gives each row its first turns, and samples those behind them.

    The environments answer to given turns as to sampled ones: if they are deterministic, a rollout goes on from the
    beginning of any turn, or is played again as a whole.
    """

    def __init__(self, sampler: ContinuedTurns, given: Sequence[Turns]) -> None:
        self.sampler, self.given = sampler, [[*turns] for turns in given]

    def sample(self, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
        """See `TurnSampler.sample`."""
        known = {
            request.row: (self.given[request.row].pop(0), request) for request in requests if self.given[request.row]
        }
        asked = [request for request in requests if request.row not in known]
        turns = dict(zip((request.row for request in asked), self.sampler.sample(asked), strict=True))
        for row, (ids, request) in known.items():
            ended = self.sampler.ending(request.stop)(torch.tensor([ids]))
            turns[row] = SampledTurn([*ids], [0.0] * len(ids), bool(ended))
        return [turns[request.row] for request in requests]


class GivenEngine(HFEngine):
    """An engine whose rollouts begin with given turns."""

    def __init__(self, given: Sequence[Turns]) -> None:
        super().__init__(CACHE_TOKENS)
        self.given = given

    @contextmanager
    def turns(self, sampling: Sampling) -> Iterator[TurnSampler]:
        """See `RolloutEngine.turns`."""
        with super().turns(sampling) as sampler:
            yield GivenTurns(sampler, self.given)


def play_from(
    policy: Policy, prompts: Sequence[Prompt], given: Sequence[Turns], sampling: Sampling, seed: int
) -> SampledBatch:
    """Rollouts in groups of one size, each of which begins with given turns."""
    engine = GivenEngine(given)
    engine.update_weights(policy)
    seeds = [derive_seed(seed, k) for k in range(len(given))]
    return play(engine, policy, prompts, len(given) // len(prompts), sampling, seeds)


# --- the lines ---

Scorer = Callable[[Policy, RolloutBatch, CreditContext], Tensor]

COMPACT = (
    "-log p",
    "entropy",
    "position",
    "the row leaves the tree",
    "GRAIL",
    "OAR-G",
    "TreeAdvantage",
    "TreeAdvantage, permuted rewards",
    "TreeAdvantage, permuted and mirrored rewards",
    "TreeAdvantage, own_row=false",
    "TreeAdvantage, state=numbers",
    "TreeAdvantage, state=numbers, permuted rewards",
    "Resampled, bisection, K=4",
    "Resampled, bisection, K=8",
    "Oracle, right=balanced",
    "PRIME, token reward",
    "PRIME, token reward, permuted",
)
"""The lines of a compact table."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A line of the table.

    Attributes:
        name: The name in the first cell.
        method: A credit method, or a bare score ``[B, T]`` of each token.
        control: The control experiment that wraps the method.
        by: The quantity that ranks tokens: the score if the weights increase with it, else the weights.
        baseline: `objective.baseline`.
        train_equal: `objective.train_equal`.
    """

    name: str
    method: TokenCredit | Scorer
    control: CreditControl | None = None
    by: Literal["score", "weight"] = "weight"
    baseline: float | Literal["energy"] = 1.0
    train_equal: bool = False


def negative_logprob(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return -logprobs(policy, batch, context, torch.arange(len(batch)))


def entropy(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return entropies(policy, batch, context, torch.arange(len(batch)))


def position(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return torch.arange(batch.response_mask.shape[1]).float().expand(batch.response_mask.shape)


def leaves_tree(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """1 at the first token of each row after which no other row of its group is at the same place."""
    nodes = response_nodes(batch.response_ids, batch.response_mask, batch.group)
    number = torch.bincount(nodes[nodes >= 0])[nodes.clamp(min=0)].masked_fill(nodes < 0, 0)
    alone = number == 1
    return (alone & (alone.cumsum(1) == 1)).float()


def pad_effect(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """The drop in the mean log-likelihood of the response's own answer if a token is replaced by the pad token."""
    scores = OARPerturbation("answer_joint", at_temperature=True)(policy, batch, context).scores
    assert scores is not None
    return scores


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
        return Resampled(number, search=search, budget=10**9)

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


def with_turns(every: list[Subject]) -> list[Subject]:
    """The lines of a world of several turns: those that run there, and the methods that credit turns.

    `CriticSearch`, `SpanScores`, `TurnRewards` and `GiGPO, scores=true` read the labels of the world.
    """
    own = {
        "TreeAdvantage, state=turns": TreeAdvantage(state="turns"),
        "TreeAdvantage, state=turns, permuted rewards": PermutedRewards(TreeAdvantage(state="turns")),
        "OptimalBaseline, unit=turn": OptimalBaseline(unit="turn"),
        "GiGPO": GiGPO(),
        "GiGPO, permuted rewards": PermutedRewards(GiGPO()),
        "IGPO": IGPO(),
        "GiGPO, scores=true": GiGPO(scores=True),
        "TurnRewards": TurnRewards(),
        "CriticSearch, program": CriticSearch(),
        "CriticSearch, permuted labels": CriticSearch(labels="permuted"),
        "CriticSearch, random labels": CriticSearch(labels="random"),
        "SpanScores": SpanScores(),
        "SpanScores, permuted scores": SpanScores(scores="permuted"),
        "SpanScores, random scores": SpanScores(scores="random"),
    }
    running = [s for s in every if not any(part in s.name for part in ("numbers", "Resampled", "Oracle"))]
    return [*running, *(Subject(name=name, method=method) for name, method in own.items())]


LEARNING_RATE = 1e-4


class TrainedPRIME(TokenCredit):
    """PRIME, whose reward model has taken a step on each of some batches before the first call, and takes more.

    The rewards of a batch are those from before the step on it. The policy does not change, and is the reference.

    Args:
        rollouts: A function from the policy to the batches.
        permuted: Whether outcomes are permuted within each group, in training and after it: a control.
    """

    def __init__(self, rollouts: Callable[[Policy], Iterable[RolloutBatch]], *, permuted: bool = False) -> None:
        self.rollouts = rollouts
        # All groups with both outcomes.
        prime = PRIME(
            accuracy=(0.01, 0.99), optimizer=lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, weight_decay=0.0)
        )
        self.credit = PermutedRewards(prime) if permuted else prime
        self.figures: list[str] = []
        self._models: tuple[TrainedModel, Reference] | None = None

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch."""
        second, reference = self._trained(policy, context)
        return self.credit(policy, batch, replace(context, reference=reference, second=second))

    def token_reward(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
        """``[B, T]``: the log-ratio of each token alone, towards what the response earned: negated in wrong ones."""
        second, reference = self._trained(policy, context)
        rows = torch.arange(len(batch))
        own, other = (logprobs(model, batch, context, rows) for model in (second.beside(policy), reference.policy))
        self(policy, batch, context)  # The next batch finds a model that has learned from this one.
        return (own - other) * (2 * batch.correct.float() - 1)[:, None]

    def _trained(self, policy: Policy, context: CreditContext) -> tuple[TrainedModel, Reference]:
        """The reward model, which the first call trains, and the reference."""
        if self._models is None:
            model = copy.deepcopy(policy).requires_grad_(True).train()
            training = self.credit.needs().training
            assert training is not None
            second = TrainedModel(model, training, SingleDeviceStrategy("cpu"), 1.0)
            self._models = second, Reference(copy.deepcopy(policy).requires_grad_(False))
            for number, earlier in enumerate(self.rollouts(policy), start=1):
                found = self(policy, earlier, replace(context, step=number))
                loss, right = (found.metrics[f"reward_model_{name}"] for name in ("loss", "accuracy"))
                self.figures.append(f"{loss.total / loss.size:.3f} {right.total / right.size:.2f}")
        return self._models
