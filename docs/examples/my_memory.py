"""A credit method with a state: values of beginnings of responses, remembered over the steps of training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from grail_lightning import Policy, RolloutBatch, all_gather_objects
from grail_lightning.credit import CreditContext, TokenCredit, TokenWeights


class RememberedValues(TokenCredit):
    r"""Adds to each token's advantage the change of value that the token made, from all rollouts so far.

    .. math:: A_{it} = A_i + V(s_t) - V(s_{t-1}), \qquad V(s) = \text{the share of right responses that begin with } s

    Args:
        limit: The largest number of beginnings that are remembered; those seen longest ago are forgotten.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self.outcomes: dict[int, tuple[float, int]] = {}  # By beginning: the right responses, and all of them.

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 1, and the changes of value as an additive stage."""
        paths = [_beginnings(batch, row) for row in range(len(batch))]
        mine = list(zip(paths, batch.correct.float().tolist(), strict=True))
        for rank in all_gather_objects(mine):  # Every rank has the same memory.
            self._remember(rank)
        additive = torch.zeros_like(batch.response_mask, dtype=batch.advantages.dtype)
        for row, path in enumerate(paths):
            totals = torch.tensor([self.outcomes.get(key, (0.0, 1)) for key in path], dtype=torch.float64)
            change = (totals[:, 0] / totals[:, 1]).diff()
            additive[row, batch.response_mask[row]] = change.to(additive)
        return TokenWeights(
            values=batch.response_mask.to(additive.dtype),
            additive=additive,
            metrics={"remembered": float(len(self.outcomes))},
        )

    def _remember(self, rollouts: Iterable[tuple[list[int], float]]) -> None:
        for path, outcome in rollouts:
            for key in path:
                total, number = self.outcomes.pop(key, (0.0, 0))  # Inserted anew, so that it is the last one seen.
                self.outcomes[key] = total + outcome, number + 1
        while len(self.outcomes) > self.limit:
            del self.outcomes[next(iter(self.outcomes))]

    def state_dict(self) -> dict[str, Any]:
        """The memory, for checkpoints."""
        return {"outcomes": dict(self.outcomes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory of a checkpoint, if it has one."""
        self.outcomes = dict(state.get("outcomes", {}))


def _beginnings(batch: RolloutBatch, row: int) -> list[int]:
    """A key of the prompt, and one of each beginning of the response; the same in every step."""
    prompt = batch.attention_mask[row, : batch.prompt_width]
    digest = hashlib.blake2b(str(batch.input_ids[row, : batch.prompt_width][prompt].tolist()).encode(), digest_size=7)
    keys = [int.from_bytes(digest.digest(), "big")]
    for token in batch.response_ids[row][batch.response_mask[row]].tolist():
        digest.update(token.to_bytes(8, "big"))
        keys.append(int.from_bytes(digest.digest(), "big"))
    return keys
