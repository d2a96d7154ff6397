"""Token credit in a trainer that is not this package's: from ids, masks and rewards to advantages of tokens.

What another trainer calls, once and in each step::

    policy = as_policy(model, tokenizer)
    advantages = run_credit(GRAIL(), policy, GivenRollouts(prompt_ids=…, …), step=step)      # [B, T]

It needs no LightningModule. The trainer samples, scores and updates; its loss takes an advantage for each token.

Shapes: ``B`` rows (rollouts), ``P`` prompt tokens, ``T`` response tokens. Masks: bool or 0 and 1; True counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grail_lightning.answers.records import Verdict
from grail_lightning.core.credit.base import CreditContext, CreditControl, TokenCredit, token_advantages
from grail_lightning.core.credit.service import FrozenReference, listed
from grail_lightning.core.engines.base import build_batch
from grail_lightning.core.functional.advantages import EQUAL_REWARDS, group_sums
from grail_lightning.core.policy.capabilities import check_padding
from grail_lightning.core.policy.load import check_head
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading
from grail_lightning.core.records.episode import Episode
from grail_lightning.core.records.task import Prompt, TokenText
from grail_lightning.core.rollout.batch import RolloutBatch, SampledBatch
from grail_lightning.core.rollout.grading import align_rows, answer_masks
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.assign import of_whole_batch, scored_rows, weigh_batch
from grail_lightning.core.step.figures import StepOutput, Tally, add_credit
from grail_lightning.core.step.update import of_compared_rows
from grail_lightning.core.tasks.answered import MathTask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# --- the model --------------------------------------------------------------------------------------------------------


class _BorrowedPolicy(Policy):
    """A policy around a model that another trainer trains. The model's configs and switches stay as they are."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        loading: Loading,
        without_adapters: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        super().__init__(model, tokenizer, loading, samples=False)
        self._without_adapters = without_adapters

    @property
    def has_adapters(self) -> bool:
        """See `Policy`."""
        return self._without_adapters is not None

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """See `Policy`; the adapters are those of the other trainer's `PeftModel`."""
        assert self._without_adapters is not None
        with self._without_adapters():
            yield


def as_policy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    reference_adapter: str | None = None,
    runs: bool = True,
) -> Policy:
    """A policy around the model of another trainer, for `run_credit`; make it once.

    The model is neither copied nor changed. That its logits are those of its head, and that padding does not change a
    row, is tried on a few tokens.

    Args:
        model: A causal language model of Transformers, or a `PeftModel` around one; not wrapped for several ranks.
        tokenizer: Its tokenizer, with a pad token.
        chat_template_kwargs: Arguments of the chat template, for methods that change prompts (`RLSD`).
        reference_adapter: The adapter of a `PeftModel` that is the reference; None is the model without adapters.
        runs: Whether a method will run the model (`TokenCredit.runs_policy`). If not, any model will do, and nothing is
            tried.

    Raises:
        ValueError: If the tokenizer has no pad token, or if the architecture is one that `GrailModule` refuses, too.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "`tokenizer` must have a pad token, but got none. Set `tokenizer.pad_token = tokenizer.eos_token`: masks "
            "are given, so that any token can be it."
        )
    adapted = hasattr(model, "get_base_model")
    base: PreTrainedModel = model.get_base_model() if adapted else model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if runs and not hasattr(decoder, "layers"):
        raise ValueError(
            f"`model` must be a causal language model of Transformers with decoder blocks, but got "
            f"{type(model).__name__}. Give the model inside: `model.module` of one that is wrapped for several ranks."
        )
    loading = Loading(chat_template_kwargs=dict(chat_template_kwargs or {}))
    policy = _BorrowedPolicy(
        base, tokenizer, loading, (lambda: _with_adapter(model, reference_adapter)) if adapted else None
    )
    policy.training = base.training  # Of the wrapper alone: the model's modules keep their modes.
    if runs:
        check_head(policy)
        check_padding(policy)
    return policy


@contextmanager
def _with_adapter(model: Any, name: str | None) -> Iterator[None]:
    """A `PeftModel` with another adapter, or without any, inside the context."""
    if name is None:
        with model.disable_adapter():
            yield
        return
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)


class GivenReference(FrozenReference):
    """The reference of another trainer: its frozen model, which stays where it is, or its policy without adapters."""

    @contextmanager
    def running(self, beside: Policy) -> Iterator[Policy]:
        """See `Reference`."""
        if not self.has_adapters:
            yield self.policy
            return
        with self.policy.adapters_off():
            yield self.policy


# --- the rollouts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GivenRollouts:
    """Rollouts of another trainer as tensors: prompts padded on the left, responses padded on the right.

    Attributes:
        prompt_ids: ``[B, P]`` long.
        prompt_mask: ``[B, P]``, True on the prompt's tokens.
        response_ids: ``[B, T]`` long, as they were sampled.
        response_mask: ``[B, T]``, True on the tokens that the policy sampled, the end token included.
        rewards: ``[B]``; NaN for a rollout that nothing scored, which then has the advantage 0.
        group: ``[B]`` long, equal for the rollouts of one prompt, in any order. All of a group must be on one rank.
        valid_mask: ``[B, T]``, True on all tokens after the prompt, with what an environment put in between turns; None
            if every token was sampled.
        advantages: ``[B]``, of the rollouts; None is the reward less its group's mean.
        correct: ``[B]`` bool, for methods that read which rollouts are right; None is a reward above 0.
        finished: ``[B]`` bool, whether a response ended by itself; None is all.
        prompts: One for each row, for methods that read references, columns or the form of the answer; None has no
            reference, and the answer is in the last box.
        row: ``[B]`` long, a row's number within the step over all ranks, a key of its random numbers; None counts them.
        episodes: One for each row of a batch with several turns: the turns as text.

    Raises:
        ValueError: If a tensor has another shape, or is padded on the other side.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    rewards: Tensor
    group: Tensor
    valid_mask: Tensor | None = None
    advantages: Tensor | None = None
    correct: Tensor | None = None
    finished: Tensor | None = None
    prompts: Sequence[Prompt] | None = None
    row: Tensor | None = None
    episodes: Sequence[Episode] | None = None

    def __post_init__(self) -> None:
        rows = (len(self.response_ids),)
        shapes = dict.fromkeys(("prompt_ids", "prompt_mask"), self.prompt_ids.shape[:2])
        shapes |= dict.fromkeys(("response_ids", "response_mask", "valid_mask"), self.response_ids.shape[:2])
        shapes |= dict.fromkeys(("rewards", "group", "advantages", "correct", "finished", "row"), torch.Size(rows))
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and (tensor.shape != shape or len(tensor) != rows[0]):
                raise ValueError(
                    f"`{name}` must have the shape {[rows[0], *shape[1:]]}, but got {list(tensor.shape)}. Rows are "
                    "rollouts."
                )
        for name in ("prompts", "episodes"):
            if (given := getattr(self, name)) is not None and len(given) != rows[0]:
                raise ValueError(f"`{name}` must have one entry for each of {rows[0]} rows, but got {len(given)}.")
        self._check_padding()

    def _check_padding(self) -> None:
        prompts, valid, sampled = self.prompt_mask.bool(), self._valid(), self.response_mask.bool()
        for name, side, padded_first in (("prompt_mask", "left", prompts), ("valid_mask", "right", ~valid)):
            if (padded_first[:, :-1] & ~padded_first[:, 1:]).any():
                raise ValueError(
                    f"`{name}` must be of rows that are padded on the {side} alone, but got a row with a gap. A mask "
                    "of sampled tokens with gaps is `response_mask`, beside a `valid_mask` without."
                )
        if (sampled & ~valid).any():
            raise ValueError("`response_mask` must lie within `valid_mask`, but got a sampled token outside of it.")

    def _valid(self) -> Tensor:
        return (self.response_mask if self.valid_mask is None else self.valid_mask).bool()

    def batch(self, policy: Policy) -> RolloutBatch:
        """The batch that credit methods take; answers are located in the form of each prompt's task."""
        sampled, device = self._sampled(policy), self.response_ids.device
        rewards, group = self.rewards.double(), self.group.long()
        correct = (rewards > 0 if self.correct is None else self.correct.bool()) & ~rewards.isnan()
        verdicts = [
            Verdict(
                correct=right,
                status="right" if right else "wrong",
                layer="none",
                gold=prompt.reference,
                prediction=prompt.task.answer(text) or "",
            )
            for right, prompt, text in zip(correct.tolist(), sampled.prompts, sampled.texts, strict=True)
        ]
        advantages = _less_the_mean(rewards, group) if self.advantages is None else self.advantages
        return RolloutBatch(
            **sampled.to(device).fields(),
            answer=answer_masks(sampled.to(device), align_rows(sampled, policy.tokenizer)),
            rewards=rewards,
            correct=correct,
            verdicts=verdicts,
            advantages=advantages.float().masked_fill(rewards.isnan(), 0),
        )

    def _sampled(self, policy: Policy) -> SampledBatch:
        valid, sampled = self._valid().cpu(), self.response_mask.bool().cpu()
        prompt_rows = zip(self.prompt_ids.cpu(), self.prompt_mask.bool().cpu(), strict=True)
        prompt_ids = [ids[mask].tolist() for ids, mask in prompt_rows]
        ids = [ids[mask].tolist() for ids, mask in zip(self.response_ids.cpu(), valid, strict=True)]
        prompts = self.prompts
        if prompts is None:
            task, decode = MathTask(), policy.tokenizer.decode
            prompts = [Prompt(messages=TokenText(decode(row), row), reference="", task=task) for row in prompt_ids]
        turns: dict[str, Any] = {}
        if bool((valid != sampled).any()) or self.episodes is not None:
            numbers = _turn_numbers(sampled)
            turns = {
                "sampled": [row[mask].tolist() for row, mask in zip(sampled, valid, strict=True)],
                "turn": [row[mask].tolist() for row, mask in zip(numbers, valid, strict=True)],
            }
        finished = [True] * len(ids) if self.finished is None else self.finished.bool().tolist()
        encoded = [
            Prompt(messages=TokenText("", row), reference="", task=prompt.task)
            for row, prompt in zip(prompt_ids, prompts, strict=True)
        ]
        batch = build_batch(policy, encoded, 1, ids, finished, **turns)
        row = batch.row if self.row is None else self.row.long().cpu()
        episodes = None if self.episodes is None else list(self.episodes)
        return batch.replace(prompts=list(prompts), group=self.group.long().cpu(), row=row, episodes=episodes)


def _turn_numbers(sampled: Tensor) -> Tensor:
    """``[B, T]`` long: a turn begins where the policy samples after tokens that were put in; these belong to it."""
    before = torch.nn.functional.pad(sampled[:, :-1], (1, 0), value=False)
    return ((sampled & ~before).long().cumsum(1) - 1).clamp(min=0)


def _less_the_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """``[B]`` float64: the reward less its group's mean; exactly 0 in a group of one, and where all are equal."""
    advantages = torch.zeros_like(rewards)
    scored = ~rewards.isnan()
    total, size = group_sums(rewards[scored], group[scored])
    centred = rewards[scored] - total / size
    varying, _ = group_sums((centred.abs() > EQUAL_REWARDS).double(), group[scored])
    advantages[scored] = centred.masked_fill((size < 2) | (varying == 0), 0)
    return advantages


# --- the credit -------------------------------------------------------------------------------------------------------


class AssignedCredit(NamedTuple):
    """The credit of a batch of another trainer."""

    advantages: Tensor  # [B, T] float32, as wide as the ids that were given; 0 outside `response_mask`.
    output: StepOutput  # The batch, its token weights, and figures by name, `credit/…`, over all ranks.


def run_credit(
    credit: TokenCredit,
    policy: Policy,
    rollouts: GivenRollouts,
    *,
    control: CreditControl | None = None,
    reference: Policy | None = None,
    step: int = 0,
    seed: int = 0,
    temperature: float = 1.0,
    token_budget: int = 16_384,
) -> Tensor:
    r"""The advantage of each token, for the loss of any trainer.

    .. math:: A_{it} = A_i\, w_{it} + \mathrm{additive}_{it}

    ``A_i`` are the rollouts' advantages, ``w`` and ``additive`` the credit method's. Call it with the weights that
    sampled, under the trainer's autocast, on every rank equally often. Parameters receive no gradient, and modes and
    random states stay as they are.

    Args:
        credit: The method. If it has a state (`RLSD`), `credit.state_dict()` belongs to your checkpoints.
        policy: The model, from `as_policy`.
        rollouts: Ids, masks, rewards and groups.
        control: A control experiment around the method.
        reference: The frozen reference, from `as_policy`, for methods that compare with it (`DGPO`); not needed if the
            policy has adapters.
        step: The number of optimiser steps taken so far: a key of random numbers, and a clock of methods that decay.
        seed: The run's seed, the other key.
        temperature: The sampling temperature; logits are divided by it.
        token_budget: Most tokens in a forward pass.

    Returns:
        ``[B, T]`` float32; 0 outside the response mask.

    Raises:
        ValueError: If the method uses what this function does not have: an engine, a second model, a reference.
    """
    context = context_of(
        credit, policy, reference=reference, step=step, seed=seed, temperature=temperature, token_budget=token_budget
    )
    return assign(credit, control, policy, rollouts, context).advantages


def context_of(
    credit: TokenCredit,
    policy: Policy,
    *,
    reference: Policy | None,
    step: int,
    seed: int,
    temperature: float,
    token_budget: int,
) -> CreditContext:
    """The context of a credit method, with the arguments of `run_credit`."""
    check_services(credit, has_reference=reference is not None or policy.has_adapters)
    return CreditContext(
        step=step,
        generator=torch.Generator().manual_seed(derive_seed(seed, "credit", step)),
        token_budget=token_budget,
        temperature=temperature,
        services={FrozenReference: GivenReference(reference or policy)},
    )


def assign(
    credit: TokenCredit, control: CreditControl | None, policy: Policy, rollouts: GivenRollouts, context: CreditContext
) -> AssignedCredit:
    """The result of `run_credit` with what it was computed from."""
    whole = rollouts.batch(policy)
    batch = scored_rows(whole)
    weights = of_compared_rows(weigh_batch(credit, control, policy, batch, context), batch)
    tally = Tally()
    if batch.scored.all():  # Else this rank has none.
        add_credit(tally, batch, weights)
    weights = of_whole_batch(weights, whole)
    advantages = token_advantages(whole.advantages, weights).float()
    missing = rollouts.response_ids.shape[1] - advantages.shape[1]
    padded = torch.nn.functional.pad(advantages, (0, missing))
    return AssignedCredit(padded, StepOutput(whole, weights, tally.compute()))


def check_services(credit: TokenCredit, *, has_reference: bool) -> None:
    """Check that a method uses nothing that only a run of `GrailModule` opens."""
    for kind, owner in listed([credit]).items():
        name = f"`{type(owner).__name__}`"
        if issubclass(kind, FrozenReference):
            if not has_reference:
                raise ValueError(
                    f"`credit` must be a method that needs no reference, since this run has none, but got {name}, "
                    "which compares the policy with it. Give a reference or adapters, or take another method."
                )
            continue
        what = "samples with the rollout engine" if kind.uses_engine else "uses the service"
        what = "trains a second model" if kind.trains_model else what
        raise ValueError(
            f"`credit` must be a method that reads rollouts and model alone, but got {name}, which {what} "
            f"(`{kind.__name__}`): only `GrailModule` has that. Take another method."
        )
