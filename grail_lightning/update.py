"""The gradients of one batch of rollouts, optimiser step by optimiser step.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from grail_lightning.functional.tokens import TokenStats
from grail_lightning.objective import (
    SAMPLER_GAP,
    LossCounts,
    Objective,
    costs_behind_prompts,
    cut,
    live_rows,
    loss_mask,
    micro_batch_loss,
    prompt_blocks,
    saved_by_sharing,
    split_groups,
    token_advantages,
)
from grail_lightning.policy import Policy
from grail_lightning.policy.prefix import SharedPrompts, can_share_prompts, drops_out
from grail_lightning.policy.trees import PrefixTrees, can_branch, cut_into_trees, first_alike, look_up, reaches
from grail_lightning.ranks import in_step, over_ranks, world_size
from grail_lightning.rollout import RolloutBatch, Sampling, TokenWeights, micro_batches
from grail_lightning.seeds import derive_seed

NO_ROWS = torch.zeros(0, dtype=torch.long)

SHARE_FROM = 0.1
"""Share of the tokens that reading prompts once, or of the cost that trees must save (docs/performance.md)."""

BESIDE_PROMPTS = 0.8
"""What trees must save beside what shared prompts do: they copy no keys and values (docs/performance.md)."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A micro-batch.

    Attributes:
        rows: ``[n]`` long, its rows.
        prompts: Those that they have in common with others.
        last: Whether no other micro-batch follows with these prompts.
        starts: At which of the rows a prefix tree begins; None if they are run apart.
        spoken_by: ``[n]`` long, for each row the one of them that says the same and is run for it; None if all are run.
        tokens: How many are run, prompts that are run for several micro-batches with the last of these.
    """

    rows: Tensor = NO_ROWS
    prompts: SharedPrompts | None = None
    last: bool = False
    starts: list[int] | None = None
    spoken_by: Tensor | None = None
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.rows)


class SharedCredit(Protocol):
    """Credit that needs a forward pass which the update makes anyway: the first of each row."""

    rows: Tensor
    """``[B]`` bool on the CPU: the rows concerned."""

    def forward(
        self, policy: Policy, piece: RolloutBatch, part: Tensor, *, frozen: bool, behind: Any = None
    ) -> tuple[TokenStats, TokenWeights]:
        """Log-probabilities with entropy, and the token weights, of the rows `part` that are `piece`.

        `behind` are keys and values of the prompts, as for `Policy.forward`.
        """

    def repeat(self, source: Tensor, rows: Tensor) -> None:
        """Take what `forward` has found of the rows `source` ``[n]`` for others that say the same."""


class Update:
    """Plans the optimiser steps of one batch of rollouts and accumulates the gradients of each.

    Every collective is reached by every rank the same number of times, whatever its rows look like: ranks agree on the
    number of optimiser steps and of micro-batches, and a rank with fewer runs empty ones.

    Args:
        policy: Whose gradients.
        reference: The frozen reference of the KL term; None with adapters (switched off instead) or without the term.
        batch: ``B`` rows with advantages.
        objective: What to compute.
        sampling: How the rows were drawn.
        seed: Of the order of groups, if a pass has several mini-batches.
        shared: Gives the token weights of some rows beside their first forward pass.

    Attributes:
        entropies: ``[B, T]`` in nats, as they were when a row first came by; zero on rows that did not.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        batch: RolloutBatch,
        objective: Objective,
        sampling: Sampling,
        seed: int,
        shared: SharedCredit | None = None,
    ) -> None:
        self.policy, self.objective, self.sampling = policy, objective, sampling
        self.mask = loss_mask(batch, objective)
        self.batch = batch
        self.advantages = torch.zeros_like(self.mask, dtype=torch.float32)
        self.entropies = torch.zeros_like(self.advantages)
        self.live = torch.zeros(len(batch), dtype=torch.bool)
        self._reference = reference
        self._seed = seed
        self._shared = shared
        self._taken, self._apart = 0, False
        self._lengths = batch.lengths.cpu()
        self._old: Tensor | None = None
        self.steps: list[Tensor] = []

    def plan(self, weights: Tensor, additive: Tensor | None) -> list[Tensor]:
        """Take in the token weights ``[B, T]``; the rows of each optimiser step.

        Without a live row on any rank there is one step with no rows, which then changes nothing.
        """
        self.reweigh(weights, additive)
        if not over_ranks(self.live.sum().to(self.mask.device), "sum"):
            self.steps = [NO_ROWS]
            return self.steps
        for number in range(self.objective.updates_per_batch):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, number))
            self.steps += split_groups(self.batch, self.objective, generator)
        everything = self.live.nonzero().flatten()
        if self.objective.kl_coefficient:
            self.batch = self.batch.replace(ref_logprobs=self._reference_logprobs(everything))
        self._apart = len(self.steps) > 1 and self.policy.training and drops_out(self.policy)
        if self._apart:
            # The policy that sampled had no dropout: what the first step has, with it, would be another one's.
            self.batch = self.batch.replace(old_logprobs=self._logprobs(self.policy, everything))
        elif self.objective.mini_batches > 1:
            # The rows of the first step come by before anything has moved; the others have to be asked in advance.
            later = everything[~torch.isin(everything, self.steps[0])]
            self._old = self._logprobs(self.policy, later, self._shared)
        return self.steps

    def reweigh(self, weights: Tensor, additive: Tensor | None) -> None:
        """Take in other token weights for the steps to come."""
        assert self.batch.advantages is not None
        self.advantages = token_advantages(self.batch.advantages, weights, additive)
        self.live = live_rows(self.batch, self.mask, self.objective, additive).cpu()

    def accumulate(self, rows: Tensor, backward: Callable[[Tensor, bool], None]) -> dict[str, float]:
        """Forward and backward passes of one optimiser step.

        Args:
            rows: The rows of the step.
            backward: Gets the loss of each micro-batch, and whether it is the step's last.

        Returns:
            Metrics over all ranks.
        """
        counted = self.mask[rows.to(self.mask.device)]
        counts = over_ranks(torch.stack([counted.any(1).sum(), counted.sum()]), "sum").tolist()
        live = rows[self.live[rows]]
        parts = in_step(self._cut(self.policy, live, self._shared), Piece(), self.mask.device)
        sums: dict[str, Tensor] = {}
        recorded = torch.zeros_like(self.advantages)
        for number, part in enumerate(parts, start=1):
            loss, found = self._loss(part, LossCounts(num_rollouts=counts[0], num_tokens=counts[1]), recorded)
            # Strategies average gradients over ranks; the denominators are those of all ranks already.
            loss = loss * world_size()
            if part.prompts is not None and part.last:
                loss = loss + part.prompts.outstanding()
            backward(loss, number == len(parts))
            sums = {name: sums.get(name, torch.zeros_like(value)) + value for name, value in found.items()} or sums
        if self._taken == 0:
            self._shared = None  # All of its rows have come by.
        if self._taken == 0 and not self._apart:
            self.batch = self.batch.replace(old_logprobs=recorded if self._old is None else recorded + self._old)
        self._taken += 1
        sums["run"] = counted.new_tensor(sum(part.tokens for part in parts), dtype=torch.long)
        sums["asked"] = counted.new_tensor(self._tokens(live), dtype=torch.long)
        return self._means(sums) if parts else {"loss": 0.0}

    def _loss(self, cut: Piece, counts: LossCounts, recorded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        piece, stats = self._forward(self.policy, cut, self._shared)
        if not len(cut):
            return stats.logprobs.sum() * 0, {}
        part, columns = cut.rows.to(self.mask.device), piece.response_mask.shape[1]
        recorded[part, :columns] = stats.logprobs.detach().to(recorded.dtype)
        if stats.entropy is not None and self._taken < self.objective.mini_batches:
            self.entropies[part, :columns] = stats.entropy.detach().to(self.entropies.dtype)
        return micro_batch_loss(
            stats,
            piece,
            self.advantages[part, :columns],
            self.mask[part, :columns],
            self.objective,
            counts,
            self.sampling.max_response_length,
        )

    def _means(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Token means over all ranks of what the micro-batches summed up. A rank may have had none."""
        names = ["tokens", "loss", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
        names += ["kl"] if self.objective.kl_coefficient else []
        names += [SAMPLER_GAP] if self.batch.sampling_logprobs is not None else []
        zero = torch.zeros((), device=self.mask.device)
        local = torch.stack([sums.get(name, zero).double() for name in ("run", "asked", *names)])
        run, asked, tokens, loss, *others = over_ranks(local, "sum").tolist()
        means = {name: value / max(tokens, 1) for name, value in zip(names[2:], others, strict=True)}
        return {"loss": loss, "shared_tokens": 1 - run / max(asked, 1)} | means

    def _cut(self, policy: Policy, rows: Tensor, shared: SharedCredit | None) -> list[Piece]:
        """Micro-batches; the rows whose credit is shared apart from the others, which need no saliency."""
        trees = self.objective.share_prompts and can_branch(policy)
        if shared is not None:
            # A token of several rows would have a saliency for each of them.
            mine, others = rows[shared.rows[rows]], rows[~shared.rows[rows]]
            first = first_alike(self.batch, mine) if self.objective.share_prompts else mine
            pieces = []
            for piece in self._cut_rows(policy, torch.unique(first), trees=False):
                theirs = torch.isin(first, piece.rows)
                pieces.append(dataclasses.replace(piece, rows=mine[theirs], spoken_by=first[theirs]))
            return pieces + self._cut_rows(policy, others, trees=trees)
        return self._cut_rows(policy, rows, trees=trees)

    def _cut_rows(self, policy: Policy, rows: Tensor, *, trees: bool) -> list[Piece]:
        """Micro-batches of whole rows, of rows behind shared prompts or of prefix trees, as saves most."""
        saved = saved_by_sharing(self.batch, rows) if self.objective.share_prompts and can_share_prompts(policy) else 0
        if trees and len(rows) and reaches(policy, self.batch.input_ids.shape[1]):
            # A block has about 12 D² weights, and attends at the cost of 2 D of them.
            span = 6 * policy.model.config.get_text_config().hidden_size
            groves, more = cut_into_trees(self.batch, rows, self.objective.token_budget, span)
            if more >= max(BESIDE_PROMPTS * saved, SHARE_FROM):
                return [Piece(rows, starts=starts, tokens=tokens) for rows, starts, tokens in groves]
        if saved < SHARE_FROM:
            return [Piece(part, tokens=self._tokens(part)) for part in cut(self.batch, rows, self.objective)]
        pieces = []
        for block, taken in prompt_blocks(self.batch, rows, self.objective):
            # Of prompts of one token there is nothing to run in advance.
            prompts = SharedPrompts(policy, self.batch, block) if taken else None
            room = max(1, self.objective.token_budget - taken)
            parts = micro_batches(costs_behind_prompts(self.batch), room, block)
            pieces += [
                Piece(part, prompts, last=part is parts[-1], tokens=int(self._lengths[part, 1].sum())) for part in parts
            ]
            if prompts is not None:
                pieces[-1] = dataclasses.replace(pieces[-1], tokens=pieces[-1].tokens + prompts.tokens)
        return pieces

    def _tokens(self, rows: Tensor) -> int:
        """Of some rows, without what they end with, which predicts nothing."""
        return int(self._lengths[rows].sum()) - len(rows)

    def _forward(
        self, policy: Policy, cut: Piece, shared: SharedCredit | None, *, frozen: bool = False
    ) -> tuple[RolloutBatch, TokenStats]:
        """A micro-batch, trimmed, and what came of it; takes in token weights that come with it.

        Frozen is without gradient. A rank that has run out of rows stays in step with the others on a row of its own,
        the first with a response.
        """
        if shared is not None and cut.spoken_by is not None:
            return self._forward_with_credit(policy, cut, cut.spoken_by, shared, frozen=frozen)
        part = cut.rows if len(cut) else self.batch.response_mask.any(1).long().argmax().reshape(1).cpu()
        piece = self.batch.select(part)
        behind = None if cut.prompts is None else cut.prompts.behind(part, piece.prompt_width, last=cut.last)
        rows = (piece.input_ids, piece.attention_mask, piece.response_mask)
        plain: TokenStats = policy(
            *rows,
            temperature=self.sampling.logprob_temperature,
            with_entropy=not frozen,
            entropy_gradient=bool(self.objective.entropy_coefficient) and not frozen,
            behind=behind,
            trees=None if cut.starts is None else PrefixTrees(*rows, cut.starts),
        )
        return piece, plain

    def _forward_with_credit(
        self, policy: Policy, cut: Piece, spoken_by: Tensor, shared: SharedCredit, *, frozen: bool
    ) -> tuple[RolloutBatch, TokenStats]:
        """`_forward` of rows whose token weights come with it: one of those that say the same is run for all."""
        run, index = torch.unique(spoken_by, return_inverse=True)
        piece = self.batch.select(run)
        behind = None if cut.prompts is None else cut.prompts.behind(run, piece.prompt_width, last=cut.last)
        stats, weights = shared.forward(policy, piece, run, frozen=frozen, behind=behind)
        shared.repeat(spoken_by, cut.rows)
        assert piece.advantages is not None
        found = token_advantages(piece.advantages, weights.values, weights.additive)
        index = index.to(found.device)
        self.advantages[cut.rows.to(found.device), : found.shape[1]] = found[index].to(self.advantages.dtype)
        entropy = None if stats.entropy is None else stats.entropy[index]
        return self.batch.select(cut.rows), TokenStats(look_up(stats.logprobs, index), entropy)

    @torch.no_grad()
    def _logprobs(self, policy: Policy, rows: Tensor, shared: SharedCredit | None = None) -> Tensor:
        """``[B, T]`` log-probabilities of some rows, zero on the others."""
        found = torch.zeros_like(self.advantages)
        with policy.evaluating():  # Without dropout.
            for part in in_step(self._cut(policy, rows, shared), Piece(), self.mask.device):
                logprobs = self._forward(policy, part, shared, frozen=True)[1].logprobs
                if len(part):
                    found[part.rows.to(found.device), : logprobs.shape[1]] = logprobs.to(found.dtype)
        return found

    def _reference_logprobs(self, rows: Tensor) -> Tensor:
        if self.policy.loading.lora is not None:
            with self.policy.adapters_off():
                return self._logprobs(self.policy, rows)
        assert self._reference is not None, "the KL term needs a reference"
        return self._logprobs(self._reference, rows)
