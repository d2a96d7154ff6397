"""The options that define how a training step is run; what is optimised is `grail_lightning.core.objective`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grail_lightning.core.functional.policy_gradient import check_cap
from grail_lightning.core.runtime.checks import check_options

_AUTO_CAP = 2.0


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The options that define how a training step is run.

    Attributes:
        group_size: Number of rollouts of each prompt.
        refill_rounds: Most further samplings to replace groups that are all right or all wrong (dynamic sampling).
        sample_ahead: Whether the next batch is sampled while this one trains, with the weights from before its update
            (one batch off-policy). It needs `sampler_cap`, and an engine that samples elsewhere.
        num_iterations: Number of iterations, each of which goes over all rollouts of the batch once.
        mini_batches: Number of optimiser steps of each iteration; groups are not split, unless `split_groups` is set.
        split_groups: Whether the rollouts of all prompts are dealt over the mini-batches one by one, at random: right
            and wrong rollouts of a prompt then stand in one optimiser step only as often as chance has it. The deal
            depends on the seed and on the optimiser steps so far, not on the number of ranks. A control; it shares
            fewer prefixes.
        token_budget: Most tokens of a micro-batch. Padding counts. Tokens that rows share (`share_prefixes`) count
            once, and a quarter of them again for each row whose attention needs a copy of them.
        share_prefixes: Whether common beginnings of rows are run once, forward and backward.
        sampler_cap: Upper bound of weights that correct for a sampler that differs from the trainer; null is off, auto
            is 2 with engines that sample with a copy of the weights, such as vLLM, and off with others.
        max_grad_norm: Norm to which gradients are scaled down; null is off.
    """

    group_size: int = 8
    refill_rounds: int = 0
    sample_ahead: bool = False
    num_iterations: int = 1
    mini_batches: int = 1
    split_groups: bool = False
    token_budget: int = 16384
    share_prefixes: bool = True
    sampler_cap: float | Literal["auto"] | None = "auto"
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_options(self, "execution", group_size="[2, inf)", refill_rounds="[0, inf)", num_iterations="[1, inf)")
        check_options(self, "execution", mini_batches="[1, inf)", token_budget="[1, inf)")  # noqa: S106 (no password)
        if self.split_groups and self.mini_batches == 1:
            raise ValueError(
                "`execution.mini_batches` must be at least 2 with `execution.split_groups`, which deals the rows of a "
                "group over several optimiser steps, but got 1. Set it, or leave `execution.split_groups` out."
            )
        if self.max_grad_norm is not None:
            check_options(self, "execution", max_grad_norm="(0, inf)")
        if isinstance(self.sampler_cap, str):
            check_options(self, "execution", sampler_cap=Literal["auto"])
        elif self.sampler_cap is not None:
            check_cap(self.sampler_cap)
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

    @property
    def steps_per_batch(self) -> int:
        """The optimiser steps of a batch of rollouts; a batch in which no rank has a row to run counts as one step."""
        return self.num_iterations * self.mini_batches


def resolve_cap(cap: float | Literal["auto"] | None, copies_weights: bool) -> float | None:
    """The bound of `Execution.sampler_cap` for an engine that samples with a copy of the weights, or does not."""
    if isinstance(cap, str):
        return _AUTO_CAP if copies_weights else None
    return cap
