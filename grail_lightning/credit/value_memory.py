"""A memory of the outcomes of states over training steps, by prompt, bounded in size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.states import States
from grail_lightning.functional.state_values import Visits
from grail_lightning.runtime.collectives import all_gather_objects

Outcomes = dict[int, tuple[float, int]]
"""The sum and the number of the outcomes of each state, by its key."""


class ValueMemory:
    """The outcomes of the states that earlier rollouts of a prompt reached.

    A state is kept if several rows of a group reached it, or if one row reached it from such a state. The prompts that
    were seen longest ago are dropped when there are more than `limit` states. All ranks hold the same memory.

    Args:
        limit: The largest number of states.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._prompts: dict[int, Outcomes] = {}

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    def recall(self, visits: Visits, states: States, batch: RolloutBatch) -> Visits:
        """The visits of a batch together with those of earlier batches."""
        now = visits.number.tolist()
        found: dict[int, tuple[float, int]] = {}
        for row, prompt in enumerate(prompt_keys(batch)):
            remembered = self._prompts.get(prompt)
            if remembered is None:
                continue
            for state, key in states.path(row):
                earlier = remembered.get(key)
                if earlier is not None:
                    found[state] = earlier
                elif now[state] < 2 and not states.merge:
                    break  # No state after it was kept.
        places = torch.tensor(list(found), dtype=torch.long)
        totals, numbers = torch.tensor(list(found.values()), dtype=torch.float64).reshape(-1, 2).unbind(1)
        return Visits(visits.total.index_add(0, places, totals), visits.number.index_add(0, places, numbers))

    def add(self, visits: Visits, states: States, batch: RolloutBatch) -> None:
        """Remember the outcomes of a batch (its own `visits`). A collective."""
        mine: list[tuple[int, Outcomes]] = []
        found: dict[int, Outcomes] = {}
        totals, numbers = visits.total.tolist(), visits.number.tolist()
        for row, (group, prompt) in enumerate(zip(batch.group.tolist(), prompt_keys(batch), strict=True)):
            if group not in found:
                found[group] = {}
                mine.append((prompt, found[group]))
            shared = True
            for state, key in states.path(row):
                before, shared = shared, numbers[state] >= 2
                if shared or before:
                    found[group][key] = (totals[state], int(numbers[state]))
                elif not states.merge:
                    break
        for rank in all_gather_objects(mine):
            self._merge(rank)

    def state(self) -> dict[str, Any]:
        """The memory for a checkpoint, in the order in which prompts were last seen."""
        keys = [key for outcomes in self._prompts.values() for key in outcomes]
        sums = [outcome for outcomes in self._prompts.values() for outcome in outcomes.values()]
        return {
            "prompts": torch.tensor(list(self._prompts), dtype=torch.long),
            "sizes": torch.tensor([len(outcomes) for outcomes in self._prompts.values()], dtype=torch.long),
            "keys": torch.tensor(keys, dtype=torch.long),
            "totals": torch.tensor([total for total, _ in sums], dtype=torch.float64),
            "numbers": torch.tensor([number for _, number in sums], dtype=torch.long),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the memory from a checkpoint; without one it is empty."""
        self._prompts = {}
        if "prompts" not in state:
            return
        sums = zip(state["totals"].tolist(), state["numbers"].tolist(), strict=True)
        entries = zip(state["keys"].tolist(), sums, strict=True)
        for prompt, size in zip(state["prompts"].tolist(), state["sizes"].tolist(), strict=True):
            self._prompts[prompt] = dict(next(entries) for _ in range(size))
        self._forget()

    def _merge(self, groups: Iterable[tuple[int, Outcomes]]) -> None:
        for prompt, outcomes in groups:
            known = self._prompts.pop(prompt, {})  # Inserted anew, so that it is the prompt last seen.
            for key, (total, number) in outcomes.items():
                before = known.get(key, (0.0, 0))
                known[key] = (before[0] + total, before[1] + number)
            self._prompts[prompt] = known
        self._forget()

    def _forget(self) -> None:
        size = len(self)
        while size > self.limit:
            oldest = next(iter(self._prompts))
            size -= len(self._prompts.pop(oldest))


def prompt_keys(batch: RolloutBatch) -> list[int]:
    """A key of each row's prompt, which is the same in every step: a digest of its tokens."""
    width = batch.prompt_width
    ids, mask = batch.input_ids[:, :width].cpu().long(), batch.attention_mask[:, :width].cpu()
    digests = (
        hashlib.blake2b(row[kept].numpy().tobytes(), digest_size=7).digest()
        for row, kept in zip(ids, mask, strict=True)
    )
    return [int.from_bytes(digest, "big") for digest in digests]
