"""The options of a training step in two groups: what is optimised, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.credit.distillation import SENTENCE, check_sentence
from grail_lightning.credit.service import FrozenReference, Service
from grail_lightning.functional.policy_gradient import (
    Aggregation,
    Estimator,
    Level,
    Surrogate,
    check_cap,
    check_clip,
    clipped_surrogate,
)
from grail_lightning.runtime.checks import check_options

_AUTO_CAP = 2.0


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The options of SDPG's loss: the KL to the same policy with the answer in its prompt (arXiv 2606.04036).

    Attributes:
        coefficient: Coefficient β of the KL, in nats a token.
        only_positive: Whether it acts on rollouts with a positive advantage alone.
        clamp: Largest KL of a token that counts; a larger one has no gradient.
        sentence: The sentence that the teacher's problem ends with; {answer} is replaced by the reference answer.

    Raises:
        ValueError: If a number is out of its range, or the sentence has no {answer}.
    """

    coefficient: float = 1e-3
    only_positive: bool = False
    clamp: float = 20.0
    sentence: str = SENTENCE

    def __post_init__(self) -> None:
        check_options(self, "objective.distillation", coefficient="(0, inf)", clamp="(0, inf)")
        check_sentence("objective.distillation.sentence", self.sentence)

    def strength(self, advantages: Tensor) -> Tensor:
        """``[n, 1]``: β of each row, from the rows' advantages ``[n]``."""
        taught = advantages > 0 if self.only_positive else torch.ones_like(advantages, dtype=torch.bool)
        return self.coefficient * taught[:, None]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The options that define the loss. The defaults are Dr. GRPO's with the upper clip of DAPO.

    Attributes:
        aggregation: Aggregation of token losses: grpo, dr_grpo or dapo.
        clip_low: Lower clip range of the ratio.
        clip_high: Upper clip range of the ratio; .inf is off.
        ratio_cap: Upper bound on the unclipped ratio (two-sided or dual clip); null is off.
        level: Whether the ratio is that of each token, or of the sequence (GSPO-token).
        surrogate: clip removes clipped tokens from the gradient; cispo keeps them, with the clipped ratio as a weight.
        entropy_coefficient: Coefficient of an entropy bonus in nats a token. Every row is then run.
        kl_coefficient: Coefficient of the KL to the frozen reference; 0 loads no reference.
        kl_estimator: Estimator of the KL: k1, k2 or k3.
        kl_corrected: Whether the estimate is multiplied by the importance ratio, which makes its gradient correct; k1
            alone has no gradient in expectation.
        mask_truncated: Whether rollouts that hit the length limit are left out of the loss.
        distillation: The KL to the policy with the answer in its prompt (SDPG); null is off.
    """

    aggregation: Aggregation = "dr_grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_cap: float | None = None
    level: Level = "token"
    surrogate: Surrogate = "clip"
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_corrected: bool = True
    mask_truncated: bool = True
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        check_options(self, "objective", kl_coefficient="[0, inf)", entropy_coefficient="[0, inf)")
        check_options(self, "objective", aggregation=Aggregation, kl_estimator=Estimator)
        check_options(self, "objective", level=Level, surrogate=Surrogate)
        check_clip(self.clip_low, self.clip_high, self.ratio_cap, self.surrogate)

    @property
    def services(self) -> tuple[type[Service], ...]:
        """The classes of the services that the loss uses: the reference of the KL term."""
        return (FrozenReference,) if self.kl_coefficient else ()

    @property
    def trains_all_rows(self) -> bool:
        """Whether rows without an advantage have a gradient, too."""
        distils = self.distillation is not None and not self.distillation.only_positive
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0 or distils

    def row_scale(self, mask: Tensor) -> Tensor:
        """``[B]`` float64: the factor of a row in the loss for its own number of tokens in it, ``mask [B, T]``."""
        lengths = mask.sum(1).clamp(min=1).double()
        return 1 / lengths if self.aggregation == "grpo" else torch.ones_like(lengths)

    def token_losses(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """`clipped_surrogate` with these options, ``[B, T]``."""
        return clipped_surrogate(
            logprobs,
            old_logprobs,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
            mask=mask,
            level=self.level,
            surrogate=self.surrogate,
        )


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The options that define how a training step is run.

    Attributes:
        group_size: Number of rollouts of each prompt.
        refill_rounds: Most further samplings to replace groups that are all right or all wrong (dynamic sampling).
        sample_ahead: Whether the next batch is sampled while this one trains, with the weights from before its update
            (one batch off-policy). It needs `sampler_cap`, and an engine that samples elsewhere.
        updates_per_batch: Number of passes over the rollouts.
        mini_batches: Number of optimiser steps of each pass; groups are not split, unless `split_groups` is set.
        split_groups: Whether the rollouts of all prompts are dealt over the mini-batches one by one, at random: right
            and wrong rollouts of a prompt then stand in one optimiser step only as often as chance has it. The deal
            depends on the seed and the step, not on the number of ranks. A control; it shares fewer prefixes.
        token_budget: Most tokens of a micro-batch. Padding counts; tokens that rows of a prefix tree share count once.
        share_prefixes: Whether common beginnings of rows are run once, forward and backward.
        sampler_cap: Upper bound of weights that correct for a sampler that differs from the trainer; null is off, auto
            is 2 with engines that sample with a copy of the weights, such as vLLM, and off with others.
        max_grad_norm: Norm to which gradients are scaled down; null is off.
    """

    group_size: int = 8
    refill_rounds: int = 0
    sample_ahead: bool = False
    updates_per_batch: int = 1
    mini_batches: int = 1
    split_groups: bool = False
    token_budget: int = 16384
    share_prefixes: bool = True
    sampler_cap: float | Literal["auto"] | None = "auto"
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_options(self, "execution", group_size="[2, inf)", refill_rounds="[0, inf)", updates_per_batch="[1, inf)")
        check_options(self, "execution", mini_batches="[1, inf)", token_budget="[1, inf)")  # noqa: S106 (no password)
        if self.split_groups and self.mini_batches == 1:
            raise ValueError(
                "`execution.mini_batches` must be at least 2 with `execution.split_groups`, which deals the rows of a "
                "group over several optimiser steps, but got 1. Set it, or leave `execution.split_groups` out."
            )
        if self.max_grad_norm is not None:
            check_options(self, "execution", max_grad_norm="(0, inf)")
        if (cap := self.decided_cap) is not None:
            check_cap(cap)
        if self.sample_ahead and self.sampler_cap is None:
            raise ValueError(
                "`execution.sampler_cap` must be set with `execution.sample_ahead`, whose rollouts come from the "
                "weights before the last update, but got null. Set it to 2."
            )
        if self.sample_ahead and self.refill_rounds:
            raise ValueError(
                f"`execution.refill_rounds` must be 0 with `execution.sample_ahead`, which has "
                f"sampled the next prompts already, but got {self.refill_rounds}. Leave one of them out."
            )

    def for_engine(self, copies_weights: bool) -> Execution:
        """The options with `sampler_cap` decided, for an engine that samples with a copy of the weights or does not."""
        return replace(self, sampler_cap=_AUTO_CAP if copies_weights else None) if self.sampler_cap == "auto" else self

    @property
    def decided_cap(self) -> float | None:
        """The bound of the weights that correct for the sampler; None if they are off, or not decided yet."""
        return None if isinstance(self.sampler_cap, str) else self.sampler_cap

    @property
    def steps_per_batch(self) -> int:
        """The number of optimiser steps of each batch of rollouts."""
        return self.updates_per_batch * self.mini_batches
