"""The weights that a subject gives to the stored rollouts of a world, and what it reads meanwhile.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grail_lightning.app.benchmark.labels import check_labels_absent
from grail_lightning.app.benchmark.programs import why_not_run
from grail_lightning.app.benchmark.reads import KINDS, ORACLE, recording
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, OBJECTIVE, OpenWorld
from grail_lightning.app.benchmark.subjects import Subject
from grail_lightning.core.credit.base import CreditControl, TokenCredit, TokenWeights, token_advantages
from grail_lightning.core.credit.controls import PermutedRewards
from grail_lightning.core.credit.service import Opened, listed, with_inner
from grail_lightning.core.functional.advantages import group_advantages
from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch
from grail_lightning.core.runtime.checks import check_tensor
from grail_lightning.core.runtime.guard import said, said_in_a_line
from grail_lightning.core.runtime.seeds import derive_seed, seeded
from grail_lightning.core.step.assign import compute_advantages, weigh_batch
from grail_lightning.gallery.continuations import SampledContinuations

WARM_UP = 32  # Stored batches on which a method trains its own model before; as many rollouts as its judgement has.
_TRIAL = 2 * GROUP_SIZE  # Rows of a trial.
_OF_TURNS = ("CriticSearch", "GiGPO", "IGPO", "SpanScores", "TurnRewards")
_BY_TURN = (("TreeAdvantage", "state", "turns"), ("OptimalBaseline", "unit", "turn"))
_ROUNDING = 1e-5  # Of weights, which are float32, relative to the largest.


class DoesNotApply(Exception):  # noqa: N818  (no error: a result)
    """A method cannot be judged in a world. The message is a sentence that says why."""


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """What a subject makes of one batch.

    Attributes:
        batch: The rollouts with the advantages of the subject's estimator.
        weights: The weights under the control; None for a bare score.
        advantages: ``[B, T]`` float32, the advantage of each token; zero for a bare score.
        ranks: ``[B, T]`` float64, by which tokens are ranked: scores, or weights beside uniform credit.
        effective: ``[B, T]`` float64, each token's advantage over that of its rollout under uniform credit with the
            group's mean as baseline, 0 where that is 0; None for a bare score.
    """

    batch: RolloutBatch
    weights: TokenWeights | None
    advantages: Tensor
    ranks: Tensor
    effective: Tensor | None


@dataclass(frozen=True, kw_only=True)
class AllWeights:
    """What a subject makes of all batches.

    Attributes:
        batches: One record a batch.
        by: What ranks tokens.
        reads: What it has read beside rollouts and policy, of `reads.KINDS`.
    """

    batches: list[Weighted]
    by: Literal["score", "weight"]
    reads: tuple[str, ...]

    @property
    def oracle(self) -> bool:
        """Whether it has read labels, or environments' scores of turns."""
        return not ORACLE.isdisjoint(self.reads)


def weigh(subject: Subject, opened: OpenWorld, seed: int = 0) -> AllWeights:
    """The weights of a subject on all batches of a world.

    Raises:
        DoesNotApply: If the method cannot be used in this world.
        ValueError: One line, if the method fails, or returns what it must not.
    """
    check_labels_absent()
    with recording() as before:
        try:
            check_applies(subject, opened)
            method: Any = copy.deepcopy(subject.method)  # It may have a state, which belongs to one world.
        except (DoesNotApply, ValueError):
            raise
        except Exception as error:  # The user's class.
            raise ValueError(f"`{subject.name}` cannot be used in {opened.world.title}: {said(error)}.") from error
    check_subject(subject, opened, seed)
    seen: dict[str, None] = dict.fromkeys([*subject.reads, *before])
    services = _services(method, subject, opened)
    if any(kind.trains_model for kind in services):
        for k, graded in enumerate(opened.further(WARM_UP)):
            seen |= dict.fromkeys(_one(subject, method, opened, graded, -1 - k, seed, services)[1])
    pairs = [_one(subject, method, opened, g, k, seed, services) for k, g in enumerate(opened.batches)]
    results = [result for result, _ in pairs]
    seen |= dict.fromkeys(kind for _, kinds in pairs for kind in kinds)
    by = subject.by or _ranking(subject, results)
    results = [replace(r, ranks=_ranks(r, by)) for r in results]
    return AllWeights(batches=results, by=by, reads=tuple(kind for kind in KINDS if kind in seen))


def under_control(weighted: AllWeights, control: CreditControl, opened: OpenWorld, seed: int = 0) -> AllWeights:
    """The same weights changed by a control: what `weigh` gives with it, without another call of the method."""
    records = []
    for number, one in enumerate(weighted.batches):
        assert one.weights is not None
        weights = control(one.weights, one.batch, opened.context(number, seed))
        advantages = token_advantages(one.batch.advantages, weights).float()
        effective = _effective(advantages, one.batch)
        record = replace(one, weights=weights, advantages=advantages, effective=effective)
        records.append(replace(record, ranks=_ranks(record, "weight")))
    return AllWeights(batches=records, by="weight", reads=weighted.reads)


def check_applies(subject: Subject, opened: OpenWorld) -> None:
    """Raise `DoesNotApply` if the method cannot be used in this world."""
    method, world = subject.method, opened.world
    if not isinstance(method, TokenCredit):
        return
    for part in with_inner(method):
        name = type(part).__name__
        options = [kind for kind, option, value in _BY_TURN if getattr(part, option, None) == value and kind == name]
        if not world.turns and (name in _OF_TURNS or options):
            raise DoesNotApply(f"`{name}` is about turns, and rollouts have one turn here.")
        if name == "TreeAdvantage" and getattr(part, "state", None) == "numbers" and (world.turns or world.programs):
            raise DoesNotApply("`TreeAdvantage` with `state: numbers` is about chains of numbers.")
        if name == "Oracle" and world.turns:
            raise DoesNotApply("`Oracle` reads labels of steps, and turns have scores here.")
    if world.turns and any(issubclass(kind, SampledContinuations) for kind in listed([method])):
        raise DoesNotApply(f"`{type(method).__name__}` continues rollouts of one turn alone.")
    try:
        method.check_prompts([[prompt for batch in opened.batches for prompt in batch.prompts[::GROUP_SIZE]]])
        for kind, owner in listed([method, subject.advantage]).items():
            kind.check(owner, opened.world.policy, opened.policy.loading)
    except ValueError as error:
        raise DoesNotApply(str(error)) from error


def check_subject(subject: Subject, opened: OpenWorld, seed: int = 0) -> None:
    """Call the method with a few rollouts; a ValueError of one line if it fails, or returns what it must not."""
    method: Any = copy.deepcopy(subject.method)
    few = opened.batches[0].select(torch.arange(_TRIAL))
    _one(subject, method, opened, few, 0, seed, _services(method, subject, opened))


def reads_rewards(subject: Subject, opened: OpenWorld, seed: int = 0) -> bool:
    """Whether the weights change if the rewards of each group are permuted: then that is a control of the method."""
    if not isinstance(subject.method, TokenCredit):
        return False
    graded = opened.batches[0]
    advantages = []
    for method in (subject.method, PermutedRewards(subject.method)):
        copied = copy.deepcopy(method)
        services = _services(copied, subject, opened)
        record, _ = _one(replace(subject, control=None), copied, opened, graded, 0, seed, services)
        advantages.append(record.advantages)
    return not torch.equal(*advantages)


def _services(method: Any, subject: Subject, opened: OpenWorld) -> Opened:
    owners: list[Any] = [subject.advantage, *([method] if isinstance(method, TokenCredit) else [])]
    return opened.services(owners)


def _one(
    subject: Subject, method: Any, opened: OpenWorld, graded: GradedBatch, number: int, seed: int, services: Opened
) -> tuple[Weighted, list[str]]:
    """What the subject makes of a batch, and what it has read. Batches before those of the world have numbers below 0.

    Only they count as steps of training.
    """
    context = opened.context(number, seed, services)
    if number < 0:
        context = replace(context, step=-number)
    policy = opened.policy
    key = derive_seed(seed, "method", number)
    random.seed(key)
    np.random.seed(key % 2**32)
    with recording() as reads, seeded(policy.device, key):
        try:
            batch = compute_advantages(graded, GROUP_SIZE, subject.advantage, OBJECTIVE, policy, context)
            weights, scores = _called(method, subject, opened, batch, context)
        except ValueError as error:
            raise ValueError(" ".join(str(error).split())) from error
        except Exception as error:  # The user's class.
            if opened.world.programs and (reason := why_not_run()):
                raise DoesNotApply(f"The method runs programs. {reason}") from error
            name, why = type(subject.method).__name__, said_in_a_line(error)
            raise ValueError(
                f"`{name}` must return weights for the rollouts of {opened.world.title}, but raised {why}."
            ) from error
    advantages, effective = torch.zeros(batch.response_mask.shape), None
    if weights is not None:
        weights = weights.changed(lambda tensor: tensor.detach().clone())
        advantages = token_advantages(batch.advantages, weights).float()
        effective = _effective(advantages, batch)
    record = Weighted(
        batch=batch,
        weights=weights,
        advantages=advantages,
        ranks=torch.zeros(()) if scores is None else scores.detach().double().clone(),
        effective=effective,
    )
    return record, reads


def _called(
    method: Any, subject: Subject, opened: OpenWorld, batch: RolloutBatch, context: Any
) -> tuple[TokenWeights | None, Tensor | None]:
    if isinstance(method, TokenCredit):
        weights = weigh_batch(method, subject.control, opened.policy, batch, context)
        return weights, weights.scores
    scores = method(opened.policy, batch, context)
    check_tensor(f"`{subject.name}` must return", scores, "floating-point", batch.response_mask.shape, scores.device)
    return None, scores


def _effective(advantages: Tensor, batch: RolloutBatch) -> Tensor:
    """``[B, T]``: token advantages over ``r - mean``, the advantage of uniform credit; 0 where that is 0."""
    uniform = group_advantages(batch.rewards, GROUP_SIZE).double()[:, None]
    return torch.where(uniform != 0, advantages.double() / torch.where(uniform != 0, uniform, 1), 0)


# --- what ranks tokens ------------------------------------------------------------------------------------------------


def _ranking(subject: Subject, results: Sequence[Weighted]) -> Literal["score", "weight"]:
    """Scores, if the subject has some and its weights never fall where they rise; see `Subject.by`."""
    if results[0].weights is None:
        return "score"
    if subject.control is not None or any(r.weights is None or r.weights.scores is None for r in results):
        return "weight"
    return "score" if all(map(_rises, results)) and _resolve(results) else "weight"


def _ordered(result: Weighted) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and weights ``[B, T]`` of each row's tokens in front of the answer, by rising score, and which exist."""
    assert result.effective is not None
    inside = _before_answer(result.batch)
    order = result.ranks.masked_fill(~inside, torch.inf).argsort(dim=1, stable=True)
    scores, weights = (x.masked_fill(~inside, torch.inf).gather(1, order) for x in (result.ranks, result.effective))
    return scores, weights, inside.gather(1, order)


def _rises(result: Weighted) -> bool:
    """Whether in each row the weights rise with the scores, or stay."""
    scores, weights, inside = _ordered(result)
    # Tokens with equal scores may have weights in any order: each is compared with those of smaller scores.
    before = torch.cat([torch.full_like(weights[:, :1], -torch.inf), weights[:, :-1].cummax(1).values], 1)
    starts = torch.cat([torch.ones_like(inside[:, :1]), scores[:, 1:] > scores[:, :-1]], 1)
    places = torch.where(starts, torch.arange(scores.shape[1]), 0).cummax(1).values
    smaller = before.gather(1, places)
    return bool((weights >= smaller - _ROUNDING * (1 + smaller.abs()))[inside].all())


def _resolve(results: Sequence[Weighted]) -> bool:
    """Whether weights tell most neighbouring scores apart, in rows in which they vary: a choice of tokens does not."""
    apart = total = 0
    for scores, weights, inside in map(_ordered, results):
        different = (scores[:, 1:] > scores[:, :-1]) & inside[:, 1:]
        rises = (weights[:, 1:] > weights[:, :-1]) & different
        rows = rises.any(1)
        apart, total = apart + int(rises[rows].sum()), total + int(different[rows].sum())
    return 2 * apart > total


def _before_answer(batch: RolloutBatch) -> Tensor:
    """``[B, T]`` bool: tokens in front of the answer, of rows that uniform credit trains on."""
    live = group_advantages(batch.rewards, GROUP_SIZE)[:, None] != 0
    return batch.response_mask & ~batch.answer.whole & ~batch.answer.after & live


def _ranks(result: Weighted, by: Literal["score", "weight"]) -> Tensor:
    if by == "score":
        return result.ranks
    assert result.effective is not None
    return result.effective
