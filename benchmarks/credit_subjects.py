"""The lines of the tables of benchmarks/credit_quality.py and credit_gradients.py: methods, scorers and controls.

This module belongs to them and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from credit_values import Lab, WorldName
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from grail_lightning import AdvantageEstimator, GroupMean, Policy, Prompt, RolloutBatch, credit
from grail_lightning.core.credit.base import TokenWeights
from grail_lightning.core.credit.measure import entropies, logprobs
from grail_lightning.core.policy.layout import group_nodes
from grail_lightning.core.rollout.grading import align_rows, answer_masks
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.credit import (
    CreditContext,
    CreditControl,
    FrozenReference,
    PermutedRewards,
    TokenCredit,
    TrainedModel,
    TreeAdvantage,
)
from grail_lightning.functional import group_advantages

PROMPTS_PER_BATCH = 32
PRIME_BATCHES = 16
PRIME_RATE = 1e-4
Scorer = Callable[[Policy, RolloutBatch, CreditContext], Tensor]

COMPACT = (
    *("-log p", "entropy", "position", "the row leaves the tree", "GRAIL", "OAR-G", "TreeAdvantage"),
    *("TreeAdvantage, permuted rewards", "TreeAdvantage, permuted and mirrored rewards"),
    *("TreeAdvantage, own_row=false", "TreeAdvantage, state=numbers"),
    *("TreeAdvantage, state=numbers, permuted rewards", "Resampled, bisection, K=4", "Resampled, bisection, K=8"),
    *("Oracle, right=balanced", "PRIME, token reward", "PRIME, token reward, permuted"),
)
"""The lines of a compact table."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A line of a table."""

    name: str
    method: TokenCredit | Scorer  # A scorer gives a bare score ``[B, T]`` of each token.
    control: CreditControl | None = None  # It wraps the method.
    by: Literal["score", "weight"] = "weight"  # What ranks tokens: the score if the weights increase with it.
    advantage: AdvantageEstimator = field(default_factory=GroupMean)


def every_row(batch: RolloutBatch) -> Tensor:
    return torch.arange(len(batch))


def position(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    return torch.arange(batch.response_mask.shape[1]).float().expand(batch.response_mask.shape)


def leaves_tree(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """1 at the first token of each row after which no other row of its group is at the same place."""
    nodes = group_nodes(batch)
    number = torch.bincount(nodes[nodes >= 0])[nodes.clamp(min=0)].masked_fill(nodes < 0, 0)
    alone = number == 1
    return (alone & (alone.cumsum(1) == 1)).float()


# The drop in the mean log-likelihood of the response's own answer if a token is replaced by the pad token.
PAD_EFFECT = Subject(
    name="pad effect on the answer (a)", method=credit.OARPerturbation("answer_joint", at_temperature=True), by="score"
)


def subjects() -> list[Subject]:
    """All lines of the table except those of the truth."""

    def grail(gate: Literal["negative", "all"], **options: Any) -> credit.GRAIL:
        return credit.GRAIL(gate=gate, saliency=credit.SaliencyOptions(**options))

    as_in_grail = credit.OARGradient(
        scope="response",
        read_at="predictor",
        product="noisy",
        bilevel=credit.BilevelOptions(interpolate=False, eps=1e-12),
    )
    return [
        Subject(name="-log p", method=lambda p, b, c: -logprobs(p, b, c, every_row(b)), by="score"),
        Subject(name="entropy", method=lambda p, b, c: entropies(p, b, c, every_row(b)), by="score"),
        Subject(name="position", method=position, by="score"),
        Subject(name="the row leaves the tree", method=leaves_tree, by="score"),
        Subject(name="Uniform", method=credit.Uniform()),
        Subject(name="GRAIL", method=grail("negative"), by="score"),
        Subject(name="GRAIL, gate=all", method=grail("all"), by="score"),
        Subject(name="GRAIL, token", method=grail("negative", read_at="token"), by="score"),
        Subject(name="GRAIL, token, gate=all", method=grail("all", read_at="token"), by="score"),
        Subject(name="GRAIL, leaf=middle, gate=all", method=grail("all", leaf="middle"), by="score"),
        Subject(name="GRAIL, leaf=last, gate=all", method=grail("all", leaf="last"), by="score"),
        Subject(name="Random(GRAIL, gate=all)", method=grail("all"), control=credit.Random()),
        Subject(name="Shuffled(GRAIL, gate=all)", method=grail("all"), control=credit.Shuffled()),
        Subject(name="AnswerOnly(GRAIL, gate=all)", method=grail("all"), control=credit.AnswerOnly()),
        Subject(name="OAR-G", method=credit.OARGradient(), by="score"),
        Subject(name="OAR-G as in GRAIL's code", method=as_in_grail, by="score"),
        Subject(name="OAR-P", method=credit.OARPerturbation(), by="score"),
        Subject(name="HighEntropy", method=credit.HighEntropy()),
        Subject(name="AdvantageReweighting", method=credit.AdvantageReweighting()),
        Subject(name="LESS", method=credit.LESS()),
        Subject(name="UCAS", method=credit.UCAS()),
        Subject(name="RLSD", method=credit.RLSD()),
        Subject(name="AttentionRhythm", method=credit.AttentionRhythm(gate="all")),
        Subject(name="AttentionRhythm, pre_plan", method=credit.AttentionRhythm("pre_plan", gate="all"), by="score"),
        Subject(name="AttentionRhythm, anchor", method=credit.AttentionRhythm("anchor", gate="all"), by="score"),
        *tree_subjects(),
    ]


def tree_subjects() -> list[Subject]:
    """The methods of the group's prefix tree, beside themselves with the rewards permuted within each group."""

    def tree(**options: Any) -> TreeAdvantage:
        return TreeAdvantage(**options)

    def resampled(number: int, search: Any) -> credit.Resampled:
        return credit.Resampled(number, search=search, budget=10**9)

    return [
        Subject(name="TreeAdvantage", method=tree()),
        Subject(name="TreeAdvantage, permuted rewards", method=PermutedRewards(tree())),
        Subject(name="TreeAdvantage, permuted and mirrored rewards", method=PermutedRewards(tree(), mirrored=True)),
        Subject(name="TreeAdvantage, own_row=false", method=tree(own_row=False)),
        Subject(name="TreeAdvantage, own_row=false, permuted rewards", method=PermutedRewards(tree(own_row=False))),
        Subject(name="TreeAdvantage, state=numbers", method=tree(state="numbers")),
        Subject(name="TreeAdvantage, state=numbers, own_row=false", method=tree(state="numbers", own_row=False)),
        Subject(name="TreeAdvantage, state=numbers, permuted rewards", method=PermutedRewards(tree(state="numbers"))),
        Subject(name="PrefixWeights", method=credit.PrefixWeights()),
        *(
            Subject(name=f"Resampled, {search}, K={number}", method=resampled(number, search))
            for search, number in (("bisection", 4), ("bisection", 8), ("everywhere", 8), ("everywhere", 32))
        ),
        Subject(name="OptimalBaseline", method=credit.OptimalBaseline()),
        Subject(name="Oracle, right=balanced", method=credit.Oracle("balanced")),
    ]


class WholeProgram(TokenCredit):
    """A method that explains an answer, which is the whole program; else it is the last `return`."""

    def __init__(self, inner: TokenCredit) -> None:
        self.inner = inner

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch of one `CodeTask`."""
        task = batch.prompts[0].task
        task.explained = "program"
        answer = answer_masks(batch, align_rows(batch, policy.tokenizer))
        task.explained = "return"
        return self.inner(policy, batch.replace(answer=answer), context)


def own_subjects(world: WorldName) -> list[Subject]:
    """The lines that a world of several turns or of programs has beside the others.

    `CriticSearch`, `SpanScores`, `TurnRewards`, `GiGPO, scores=true` and `Oracle` read the labels of the world.
    """
    turns = {
        "TreeAdvantage, state=turns": TreeAdvantage(state="turns"),
        "TreeAdvantage, state=turns, permuted rewards": PermutedRewards(TreeAdvantage(state="turns")),
        "OptimalBaseline, unit=turn": credit.OptimalBaseline(unit="turn"),
        "GiGPO": credit.GiGPO(),
        "GiGPO, permuted rewards": PermutedRewards(credit.GiGPO()),
        "IGPO": credit.IGPO(),
        "GiGPO, scores=true": credit.GiGPO(scores=True),
        "TurnRewards": credit.TurnRewards(),
        "CriticSearch, program": credit.CriticSearch(),
        "CriticSearch, permuted labels": credit.CriticSearch(labels="permuted"),
        "CriticSearch, random labels": credit.CriticSearch(labels="random"),
        "SpanScores": credit.SpanScores(),
        "SpanScores, permuted scores": credit.SpanScores(scores="permuted"),
        "SpanScores, random scores": credit.SpanScores(scores="random"),
    }
    programs = {
        "GRAIL, program": WholeProgram(credit.GRAIL(answer_overwrite="never")),
        "OAR-G, program": WholeProgram(credit.OARGradient()),
        "EGCA": credit.EGCA(),
        "EGCA, w_max=1": credit.EGCA(w_max=1),
        "EGCA, right=balanced": credit.EGCA(right="balanced"),
        "EGCA, random": credit.EGCA(blamed="random"),
        "EGCA, random, w_max=1": credit.EGCA(blamed="random", w_max=1),
        "EGCA, last": credit.EGCA(blamed="last"),
        "EGCA, permuted": credit.EGCA(blamed="permuted"),
        "ExecutedMask": credit.ExecutedMask(),
        "Oracle": credit.Oracle(),
    }
    methods: dict[str, TokenCredit] = {"search": turns, "charts": turns, "code": programs}.get(world, {})
    return [Subject(name=name, method=method) for name, method in methods.items()]


def in_world(every: list[Subject], world: WorldName) -> list[Subject]:
    """Those that run in a world, and its own."""
    left_out = {"code": ("numbers", "Resampled"), "search": ("numbers", "Resampled", "Oracle")}
    left_out["charts"] = left_out["search"]
    running = [s for s in every if not any(part in s.name for part in left_out.get(world, ()))]
    return [*running, *own_subjects(world)]


def respond(lab: Lab, prompts: Sequence[Prompt], seed: int) -> RolloutBatch:
    """Graded responses to problems, with the advantages of training: rewards less the mean of the group."""
    graded = lab.rollouts(prompts, seed)
    return graded.with_advantages(group_advantages(graded.rewards.float(), lab.setting.group_size))


class TrainedPRIME(TokenCredit):
    """PRIME, whose reward model has taken a step on each of some batches before the first call, and takes more.

    The rewards of a batch are those from before the step on it. The policy does not change, and is the reference. With
    `permuted`, a control, outcomes are permuted within each group, in training and after it.
    """

    def __init__(self, lab: Lab, seed: int, *, permuted: bool = False) -> None:
        self.lab, self.seed = lab, seed
        # All groups with both outcomes.
        self.prime = credit.PRIME(
            accuracy=(0.01, 0.99), optimizer=lambda p: torch.optim.AdamW(p, lr=PRIME_RATE, weight_decay=0.0)
        )
        self.inner = PermutedRewards(self.prime) if permuted else self.prime
        self.figures: list[str] = []  # Loss and accuracy of each batch before its step.
        self._models: tuple[TrainedModel, FrozenReference] | None = None

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch."""
        second, reference = self._trained(policy, context)
        return self.inner(policy, batch, replace(context, services={FrozenReference: reference, TrainedModel: second}))

    def token_reward(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
        """``[B, T]``: the log-ratio of each token alone, towards what the response earned: negated in wrong ones."""
        second, reference = self._trained(policy, context)
        rows = every_row(batch)
        own, other = (logprobs(model, batch, context, rows) for model in (second.beside(policy), reference.policy))
        self(policy, batch, context)  # The next batch finds a model that has learned from this one.
        return (own - other) * (2 * batch.correct.float() - 1)[:, None]

    def _trained(self, policy: Policy, context: CreditContext) -> tuple[TrainedModel, FrozenReference]:
        """The reward model, which the first call trains on rollouts of training problems, and the reference."""
        if self._models is None:
            model = copy.deepcopy(policy).requires_grad_(True).train()
            second = TrainedModel(model, self.prime.training, SingleDeviceStrategy("cpu"), 1.0)
            self._models = second, FrozenReference(copy.deepcopy(policy).requires_grad_(False))
            (problems,) = self.lab.setting.data.load("train")
            for number in range(PRIME_BATCHES):
                prompts = problems.prompts[number * PROMPTS_PER_BATCH : (number + 1) * PROMPTS_PER_BATCH]
                earlier = respond(self.lab, prompts, derive_seed(self.seed, "PRIME", number))
                weights = self(policy, earlier, replace(context, step=number + 1))
                loss, right = (weights.metrics[f"reward_model_{name}"] for name in ("loss", "accuracy"))
                self.figures.append(f"{loss.total / loss.size:.3f} {right.total / right.size:.2f}")
        return self._models


def prime_subjects(lab: Lab, seed: int) -> list[Subject]:
    """PRIME with a trained reward model, beside the same with permuted outcomes."""
    one, two = TrainedPRIME(lab, seed), TrainedPRIME(lab, seed, permuted=True)
    tokens, permuted = TrainedPRIME(lab, seed), TrainedPRIME(lab, seed, permuted=True)
    return [
        Subject(name="PRIME", method=one),
        Subject(name="PRIME, permuted", method=two),
        Subject(name="PRIME, token reward", method=tokens.token_reward, by="score"),
        Subject(name="PRIME, token reward, permuted", method=permuted.token_reward, by="score"),
    ]
