"""The rows beside which a method stands: scores, baselines, every method of the package, and their controls.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.app.benchmark.subjects import Scorer, Subject, subject_of
from grail_lightning.app.benchmark.worlds import WORLDS, World
from grail_lightning.core.credit.base import CreditContext, TokenCredit, TokenWeights
from grail_lightning.core.credit.measure import entropies, logprobs
from grail_lightning.core.policy.layout import group_nodes
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.rollout.grading import align_rows, answer_masks
from grail_lightning.worlds.code.task import CodeTask

Role = Literal["score", "baseline", "method", "variant", "control", "oracle"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A row of the benchmark.

    Attributes:
        name: Its name in tables.
        role: What it is: a bare score of tokens; a baseline without credit by token; a method of the package in its
            default form; a variant of one; a control; or what reads the labels.
        credit: The class, as `subject_of` takes it; None for a score.
        arguments: Its options.
        score: The score.
        of: The row whose control it is.
        worlds: Where it is listed.
    """

    name: str
    role: Role
    credit: str | None = None
    arguments: tuple[str, ...] = ()
    score: Scorer | None = None
    of: str | None = None
    by: Literal["score", "weight"] | None = None
    worlds: tuple[str, ...] = field(default_factory=lambda: tuple(WORLDS))

    def subject(self) -> Subject:
        """A new subject."""
        if self.credit is None:
            assert self.score is not None
            return Subject(name=self.name, method=self.score, by="score")
        return replace(subject_of(self.credit, self.arguments, self.name), by=self.by)


# --- scores -----------------------------------------------------------------------------------------------------------


def surprisal(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: −log p of each token."""
    return -logprobs(policy, batch, context, torch.arange(len(batch)))


def entropy(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: the entropy of the distribution that each token was drawn from."""
    return entropies(policy, batch, context, torch.arange(len(batch)))


def position(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: the number of the token."""
    return torch.arange(batch.response_mask.shape[1]).float().expand(batch.response_mask.shape)


def rarity(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: 1 at the first token of each row after which no other row of its group is at the same place."""
    nodes = group_nodes(batch)
    number = torch.bincount(nodes[nodes >= 0])[nodes.clamp(min=0)].masked_fill(nodes < 0, 0)
    alone = number == 1
    return (alone & (alone.cumsum(1) == 1)).float()


def chance(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: a random number for each token."""
    rows = [
        torch.rand(batch.response_mask.shape[1], generator=context.row_generator(row)) for row in batch.row.tolist()
    ]
    return torch.stack(rows)


SCORES: dict[str, Scorer] = {
    "-log p": surprisal,
    "entropy": entropy,
    "position": position,
    "the row leaves the tree": rarity,
    "chance": chance,
}


class WholeProgram(TokenCredit):
    """A method that explains an answer, which is the whole program; else it is the last `return`.

    Args:
        inner: The method.
    """

    def __init__(self, inner: TokenCredit) -> None:
        self.inner = inner

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch of one `CodeTask`."""
        task = batch.prompts[0].task
        assert isinstance(task, CodeTask)
        before, task.explained = task.explained, "program"
        try:
            answer = answer_masks(batch, align_rows(batch, policy.tokenizer))
        finally:
            task.explained = before
        return self.inner(policy, batch.replace(answer=answer), context)


# --- rows -------------------------------------------------------------------------------------------------------------

_CHAINS = ("sums", "long_sums", "words")
_TURNS = tuple(name for name, world in WORLDS.items() if world.turns)
_ONE_TURN = tuple(name for name in WORLDS if name not in _TURNS)
_PROGRAM = f"{__name__}.WholeProgram"
_SAMPLED = ("--credit.continuations=8", "--credit.search=bisection", "--credit.budget=1000000000")
_PRIME = (
    *("accuracy=[0.01,0.99]", "optimizer=torch.optim.AdamW", "optimizer.lr=1.0e-4", "optimizer.weight_decay=0.0"),
)


def _method(name: str, credit: str, *options: str, **more: object) -> Reference:
    arguments = tuple(option if option.startswith("--") else f"--credit.{option}" for option in options)
    return Reference(name=name, credit=credit, arguments=arguments, **{"role": "method"} | more)  # type: ignore[arg-type]


def _permuted(name: str, credit: str, *options: str, **more: object) -> Reference:
    """The control of a method that reads rewards: they are permuted within each group."""
    inner = tuple(f"--credit.inner.{option}" for option in options)
    told = {"role": "control", "of": name} | more
    return _method(f"{name}, permuted rewards", "PermutedRewards", f"--credit.inner={credit}", *inner, **told)


def _controlled(control: str, name: str, credit: str, *options: str, **more: object) -> Reference:
    told = {"role": "control", "of": name} | more
    return _method(f"{control}({name})", credit, *options, f"--control={control}", **told)


def _baselines() -> Iterator[Reference]:
    yield _method("Uniform", "Uniform", role="baseline")
    for share in (0.75, 0.5, 0.25, 0.0):
        arguments = "--advantage=GroupMean", f"--advantage.share={share:g}"
        yield _method(f"r - {share:g} mean" if share else "r", "Uniform", *arguments, role="baseline")
    yield _method("EnergyBaseline", "Uniform", "--advantage=EnergyBaseline", role="baseline")


def _explanations() -> Iterator[Reference]:
    """Methods that explain an answer, or measure each token."""
    yield _method("GRAIL", "GRAIL")
    yield _controlled("Shuffled", "GRAIL", "GRAIL")
    yield _controlled("AnswerOnly", "GRAIL", "GRAIL")
    yield _controlled("Random", "GRAIL", "GRAIL")
    yield _method("GRAIL, gate=all", "GRAIL", "gate=all", role="variant")
    yield _method("OAR-G", "OARGradient")
    yield _controlled("Shuffled", "OAR-G", "OARGradient")
    yield _method("OAR-P", "OARPerturbation")
    for name in ("HighEntropy", "AdvantageReweighting", "LESS", "UCAS", "DGPO", "RLSD"):
        yield _method(name, name)
    yield _method("AttentionRhythm", "AttentionRhythm", "gate=all")
    yield _method("RandomSubset", "RandomSubset", role="control")
    prime = {"worlds": _ONE_TURN}
    yield _method("PRIME", "PRIME", *_PRIME, **prime)
    yield _method("PRIME, token reward", "PRIME", *_PRIME, by="score", role="variant", **prime)
    yield _permuted("PRIME", "PRIME", *_PRIME, **prime)


def _trees() -> Iterator[Reference]:
    """Methods that read the rewards of the group."""
    yield _method("TreeAdvantage", "TreeAdvantage")
    yield _controlled("Shuffled", "TreeAdvantage", "TreeAdvantage")
    yield _permuted("TreeAdvantage", "TreeAdvantage")
    mirrored = ("--credit.inner=TreeAdvantage", "mirrored=true")
    yield _method(
        "TreeAdvantage, permuted and mirrored rewards", "PermutedRewards", *mirrored, role="control", of="TreeAdvantage"
    )
    yield _method("TreeAdvantage, own_row=false", "TreeAdvantage", "own_row=false", role="variant")
    numbers = {"worlds": _CHAINS}
    yield _method("TreeAdvantage, state=numbers", "TreeAdvantage", "state=numbers", role="variant", **numbers)
    yield _permuted("TreeAdvantage, state=numbers", "TreeAdvantage", "state=numbers", **numbers)
    yield _method("PrefixWeights", "PrefixWeights")
    yield _method("OptimalBaseline", "OptimalBaseline")
    yield _permuted("OptimalBaseline", "OptimalBaseline")
    yield _method("Resampled", "Resampled", *(option.removeprefix("--credit.") for option in _SAMPLED), worlds=_CHAINS)
    yield _method("Oracle", "Oracle", "right=balanced", role="oracle", worlds=_ONE_TURN)
    yield _method("Oracle, blame alone", "Oracle", role="oracle", worlds=_ONE_TURN)


def _turns() -> Iterator[Reference]:
    """Methods about turns. `CriticSearch`, `SpanScores` and `TurnRewards` read the scores of the environment."""
    of_turns = {"worlds": _TURNS}
    yield _method("TreeAdvantage, state=turns", "TreeAdvantage", "state=turns", role="variant", **of_turns)
    yield _permuted("TreeAdvantage, state=turns", "TreeAdvantage", "state=turns", **of_turns)
    yield _method("OptimalBaseline, unit=turn", "OptimalBaseline", "unit=turn", role="variant", **of_turns)
    yield _method("GiGPO", "GiGPO", **of_turns)
    yield _permuted("GiGPO", "GiGPO", **of_turns)
    yield _method("IGPO", "IGPO", **of_turns)
    yield _method("GiGPO, scores=true", "GiGPO", "scores=true", role="oracle", **of_turns)
    yield _method("TurnRewards", "TurnRewards", role="oracle", **of_turns)
    yield _method("CriticSearch", "CriticSearch", role="oracle", **of_turns)
    yield _method("CriticSearch, permuted labels", "CriticSearch", "labels=permuted", role="control", **of_turns)
    yield _method("SpanScores", "SpanScores", role="oracle", **of_turns)
    yield _method("SpanScores, permuted scores", "SpanScores", "scores=permuted", role="control", **of_turns)


def _programs() -> Iterator[Reference]:
    """Methods about programs, which run them."""
    code = {"worlds": ("code",)}
    grail = "--credit.inner=GRAIL", "--credit.inner.answer_overwrite=never"
    yield _method("GRAIL, program", _PROGRAM, *grail, role="variant", **code)
    yield _method("OAR-G, program", _PROGRAM, "--credit.inner=OARGradient", role="variant", **code)
    yield _method("EGCA", "EGCA", **code)
    yield _method("EGCA, w_max=1", "EGCA", "w_max=1", role="variant", **code)
    yield _method("EGCA, random", "EGCA", "blamed=random", role="control", of="EGCA", **code)
    yield _method("EGCA, permuted", "EGCA", "blamed=permuted", role="control", of="EGCA", **code)
    yield _method("ExecutedMask", "ExecutedMask", **code)


def _all() -> Iterator[Reference]:
    for name, score in SCORES.items():
        yield Reference(name=name, role="score", score=score)
    for make in (_baselines, _explanations, _trees, _turns, _programs):
        yield from make()


REFERENCES = {reference.name: reference for reference in _all()}


def references_in(world: World) -> list[Reference]:
    """The rows that are listed in a world."""
    return [reference for reference in REFERENCES.values() if world.name in reference.worlds]
