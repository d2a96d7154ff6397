"""The rows of a batch, cut into micro-batches that the policy runs one after the other.

Shapes: ``B`` rows, ``T`` response tokens, ``n`` rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grail_lightning.batch import SampledBatch
from grail_lightning.batch.rows import micro_batches
from grail_lightning.policy.capabilities import within_attention_window
from grail_lightning.policy.model import Policy
from grail_lightning.policy.trees import cut_into_trees


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The rows of one forward pass.

    Attributes:
        rows: ``[n]`` long on the CPU, in the order in which they are laid out.
        starts: The rows at which a prefix tree begins; None if every row is run separately.
        stands_in: Whether the micro-batch replaces missing work, on a rank with fewer micro-batches than others.
    """

    rows: Tensor
    starts: list[int] | None = None
    stands_in: bool = False


def cut_rows(
    policy: Policy,
    batch: SampledBatch,
    rows: Tensor,
    token_budget: int,
    *,
    share: bool = True,
    share_responses: bool = True,
) -> list[MicroBatch]:
    """Micro-batches within a token budget, the longest rows first.

    Args:
        policy: The policy that runs them. It must already be in the mode (training or evaluation) in which it will.
        batch: The rollouts, ``B`` rows.
        rows: ``[n]`` long, the rows that are run.
        token_budget: Most tokens of a micro-batch; padding counts where rows are padded.
        share: Whether common beginnings of rows are run once, if the policy supports it.
        share_responses: See `grail_lightning.policy.trees.tree_layout`.
    """
    rows = rows.cpu()
    if share and len(rows) and policy.shares_prefixes and within_attention_window(policy, batch.input_ids.shape[1]):
        ids, valid, group = (t.cpu()[rows] for t in (batch.input_ids, batch.attention_mask, batch.group))
        width = batch.prompt_width
        trees = cut_into_trees(ids, valid, group, token_budget, prompt_width=width, share_responses=share_responses)
        return [MicroBatch(rows=rows[tree.rows], starts=tree.starts) for tree in trees]
    return [MicroBatch(rows=part) for part in micro_batches(batch.lengths, token_budget, rows)]


def stand_in(batch: SampledBatch) -> MicroBatch:
    """A micro-batch for a rank without work, so that it joins the collectives: its first row with a response."""
    return MicroBatch(rows=batch.response_mask.any(1).long().argmax().reshape(1).cpu(), stands_in=True)


def scatter(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write ``values [n, t]`` of some rows into ``table [B, T]``, in the table's dtype."""
    table[rows.to(table.device), : values.shape[1]] = values.detach().to(table.dtype)
