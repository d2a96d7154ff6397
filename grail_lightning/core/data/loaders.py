"""Loaders of prompts, which shard themselves over ranks. The training loader can be resumed at its position.

They are not `torch.utils.data.DataLoader`s, so Lightning uses them unchanged and adds no sampler. Batch sizes count the
prompts of *all* ranks, so a config means the same on any number of ranks. Each prompt belongs to one rank, and so does
its whole group of rollouts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from grail_lightning.core.records.task import Prompt, response_group
from grail_lightning.core.runtime.checks import check_option, check_options
from grail_lightning.core.runtime.seeds import derive_seed


@dataclass(frozen=True)
class Curriculum:
    """From easy to hard, by a column of the training data.

    During the first `batches` batches, prompts are drawn from the easiest share of each dataset. The share grows
    linearly from `start` to all rows; then ordinary epochs begin. No prompt is drawn again before all of the share have
    been drawn.

    Args:
        column: The column of the difficulty, a number; a larger one is harder.
        batches: The number of batches of rollouts until all problems are drawn from.
        start: The share of the rows at the beginning, above 0 and at most 1.
    """

    column: str
    batches: int
    start: float = 0.2

    def __post_init__(self) -> None:
        check_options(self, "curriculum", batches="[1, inf)", start="(0, 1]")


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one dataset.

    Attributes:
        name: The name under which metrics are reported.
        prompts: The prompts; the sequence may be lazy.
        weight: The share of the training draws, relative to the weights of the other sets.
        difficulty: The difficulty of each prompt, for a curriculum.
    """

    name: str
    prompts: Sequence[Prompt]
    weight: float = 1.0
    difficulty: Sequence[float] = ()

    def __post_init__(self) -> None:
        check_option(f"weight of {self.name}", self.weight, "(0, inf)")

    def first(self, number: int) -> PromptSet:
        """The first prompts of the set."""
        return replace(self, prompts=self.prompts[:number], difficulty=self.difficulty[:number])


class EvaluationLoader:
    """A loader that yields every prompt of one dataset exactly once, in order.

    Every rank yields the same number of batches, because under FSDP all ranks must generate together. No prompt is
    repeated to fill a batch: the last batch of one rank may be smaller than that of another, or **empty**.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_batch: int, rank: int = 0, world_size: int = 1) -> None:
        self.prompts, self.prompts_per_batch = prompts, prompts_per_batch
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return math.ceil(len(self.prompts) / self.prompts_per_batch)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for start in range(0, len(self.prompts), self.prompts_per_batch):
            stop = min(start + self.prompts_per_batch, len(self.prompts))
            yield [self.prompts[index] for index in range(start + self.rank, stop, self.world_size)]


class GivenLoader(EvaluationLoader):
    """The same for given responses: those of one group, which are neighbours, stay in one batch and on one rank.

    A group without a name of its own is at most a batch. Prompts come with the number of their group as its name.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_batch: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(prompts, prompts_per_batch, rank, world_size)
        self._batches: list[list[list[int]]] = []
        every = [*prompts]  # Rows of a table become prompts each time that they are read.
        # A batch that lacks one would be sampled, the responses of the others left out.
        has_response = [isinstance(prompt.columns.get("response"), str | int | float) for prompt in every]
        if not all(has_response) and any("response" in prompt.columns for prompt in every):
            number = has_response.index(False)
            raise ValueError(
                f"`response` must be text in every row of {every[0].dataset}, or a column of none, but in prompt "
                f"{number + 1} of {len(has_response)} it is {every[number].columns.get('response')!r:.80}."
            )
        numbers = groupby(range(len(every)), key=lambda number: response_group(every[number]))
        for members in (list(members) for _, members in numbers):
            whole = every[members[0]].columns.get("response_group") is not None
            size = len(members) if whole else prompts_per_batch
            for group in (members[k : k + size] for k in range(0, len(members), size)):
                if not self._batches or sum(map(len, self._batches[-1])) + len(group) > prompts_per_batch:
                    self._batches.append([])
                self._batches[-1].append(group)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for batch in self._batches:
            yield [self._named(number, group) for group in batch[self.rank :: self.world_size] for number in group]

    def _named(self, number: int, group: list[int]) -> Prompt:
        prompt = self.prompts[number]
        name = {"response_group": group[0]} if "response" in prompt.columns else {}
        return replace(prompt, columns={**prompt.columns, **name})


class TrainingLoader:
    """An endless stream of training prompts, shuffled anew in every epoch.

    The order is a pure function of the sets, their weights, the seed and the epoch (`_epoch_order`). With a curriculum,
    its prompts (`easy_first`) come before the first epoch and count as epoch −1. The only state is the position in this
    order, counted in prompts. A resumed run therefore continues with the next prompt, even with another number of ranks
    or another batch size.

    Iterating yields ``len(self)`` batches from the position on, and continues in the next epoch if necessary. The
    loader has a length because Lightning would otherwise fetch one batch ahead, which a checkpoint would skip. The last
    batch of an epoch may be smaller. It is left out if it holds fewer prompts than there are ranks, because every rank
    needs at least one.
    """

    def __init__(
        self,
        sets: Sequence[PromptSet],
        prompts_per_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.sets, self.prompts_per_batch, self.seed = sets, prompts_per_batch, seed
        self.rank, self.world_size, self.curriculum = rank, world_size, curriculum
        self.shares = draws_per_epoch(sets)
        self.epoch, self.offset = -1 if curriculum else 0, 0
        self._order: tuple[int | None, list[tuple[int, int]]] = (None, [])
        for what, size in (("`prompts_per_batch`", prompts_per_batch), ("The training data", sum(self.shares))):
            if size < world_size:
                raise ValueError(
                    f"{what} must hold at least one prompt for each of the {world_size} ranks, but got {size}. "
                    "Use fewer devices or more prompts."
                )

    @property
    def num_prompts(self) -> int:
        """The number of draws in the current epoch, which equals the number of prompts, or in the curriculum."""
        if self.epoch < 0 and self.curriculum is not None:
            return self.curriculum.batches * self.prompts_per_batch
        return sum(self.shares)

    def __len__(self) -> int:
        batches, rest = divmod(sum(self.shares), self.prompts_per_batch)
        return batches + (rest >= self.world_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for _ in range(len(self)):
            yield self._mine(self._batch())

    def peek(self) -> list[Prompt]:
        """This rank's prompts of the batch that iterating yields next; the position does not move."""
        epoch, offset = self.epoch, self.offset
        batch = self._batch()
        self.epoch, self.offset = epoch, offset
        return self._mine(batch)

    def take(self, number: int) -> list[Prompt]:
        """This rank's part of the next `number` prompts, across epochs. All ranks must pass the same number."""
        batch = self._advance(number)
        while len(batch) < number:
            batch += self._advance(number - len(batch))
        return self._mine(batch)

    def _batch(self) -> list[tuple[int, int]]:
        """The prompts of the next batch of all ranks."""
        # After `take` the rest of an epoch may have any size. It is filled up, so that no step is tiny.
        moved = self.offset % self.prompts_per_batch and self.num_prompts - self.offset >= self.world_size
        batch = self._advance(self.prompts_per_batch)
        if moved and len(batch) < self.prompts_per_batch:
            batch += self._advance(self.prompts_per_batch - len(batch))
        return batch

    def _advance(self, number: int) -> list[tuple[int, int]]:
        """At most `number` prompts of the current epoch, or of the next one if the current one is finished."""
        if self.num_prompts - self.offset < self.world_size:
            self.epoch, self.offset = self.epoch + 1, 0
        if self._order[0] != self.epoch:
            self._order = (self.epoch, self._order_of(self.epoch))
        # The position moves before the batch is returned, so that a checkpoint after its step points to the next one.
        batch = self._order[1][self.offset : self.offset + number]
        self.offset += len(batch)
        return batch

    def _order_of(self, epoch: int) -> list[tuple[int, int]]:
        if epoch < 0 and self.curriculum is not None:
            difficulties = [s.difficulty for s in self.sets]
            return easy_first(difficulties, self.shares, self.num_prompts, self.curriculum.start, self.seed)
        return _epoch_order(self.sets, self.shares, self.seed, epoch)

    def _mine(self, batch: list[tuple[int, int]]) -> list[Prompt]:
        return [self.sets[which].prompts[index] for which, index in batch[self.rank :: self.world_size]]

    def state_dict(self) -> dict[str, Any]:
        """The position and the definition of the order; the same on all ranks."""
        state = {"epoch": self.epoch, "offset": self.offset, "shares": list(self.shares), "seed": self.seed}
        if self.epoch < 0 and self.curriculum is not None:
            state["curriculum"] = [self.curriculum.column, self.num_prompts, self.curriculum.start]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position. If the data have changed, the epoch starts from its beginning."""
        then = dict(state_dict)
        if then["epoch"] >= 0 or self.curriculum is not None:
            self.epoch, self.offset = then["epoch"], then["offset"]
        else:  # The curriculum was switched off.
            self.epoch, self.offset = 0, 0
        now = self.state_dict()
        changed = [name for name in ("shares", "seed", "curriculum") if now.get(name) != then.get(name)]
        if changed:
            rank_zero_warn(
                "The training data are not those of the checkpoint: "
                + ", ".join(f"{name} {then.get(name)} became {now.get(name)}" for name in changed)
                + f". {'The curriculum' if self.epoch < 0 else f'Epoch {self.epoch}'} starts anew, in the new order."
            )
            self.offset = 0


def draws_per_epoch(sets: Sequence[PromptSet]) -> list[int]:
    """The draws from each set in an epoch, in proportion to the weights; their sum is the number of prompts."""
    size, total = sum(len(s.prompts) for s in sets), sum(s.weight for s in sets)
    exact = [size * s.weight / total for s in sets]
    shares = [math.floor(draws) for draws in exact]
    # The largest remainders are rounded up, so that the draws sum to the size.
    for which in sorted(range(len(sets)), key=lambda i: shares[i] - exact[i])[: size - sum(shares)]:
        shares[which] += 1
    for s, share in zip(sets, shares, strict=True):
        if share < 1:
            raise ValueError(
                f"`weight` of {s.name} must give it at least one of the {size} draws of an epoch, but got {s.weight} "
                f"of {total}. Raise it above {total / size:.3g}, or leave the dataset out."
            )
    return shares


def easy_first(
    difficulties: Sequence[Sequence[float]], weights: Sequence[float], draws: int, start: float, seed: int
) -> list[tuple[int, int]]:
    """The prompts of a curriculum, as (set, index) pairs: a pure function of its arguments.

    `draws` prompts are drawn from sets in proportion to `weights`, from the easiest share of each, which grows from
    `start` to 1. No prompt is drawn again as long as one of the share has not been drawn.
    """
    rng = random.Random(derive_seed(seed, "curriculum"))  # noqa: S311 - an order, not a secret
    # Prompts of equal difficulty are in random order.
    ranked = [sorted(rng.sample(range(len(d)), len(d)), key=d.__getitem__) for d in difficulties]
    pools: list[list[int]] = [[] for _ in ranked]  # Of each set: the prompts of the share that are not drawn,
    num_reached = [0 for _ in ranked]  # and how many have been of the share.
    order = []
    for slot in range(draws):
        (which,) = rng.choices(range(len(ranked)), weights)
        reach = max(1, math.ceil((start + (1 - start) * slot / draws) * len(ranked[which])))
        pools[which] += ranked[which][num_reached[which] : reach]
        num_reached[which] = max(num_reached[which], reach)
        pools[which] = pools[which] or ranked[which][:reach]
        order.append((which, pools[which].pop(rng.randrange(len(pools[which])))))
    return order


def _epoch_order(sets: Sequence[PromptSet], shares: Sequence[int], seed: int, epoch: int) -> list[tuple[int, int]]:
    """The prompts of one epoch, as (set, index) pairs: a pure function of its arguments.

    Each set has an endless stream of permutations of its prompts, of which an epoch takes the next ``shares[i]``
    entries. So no prompt is drawn again before all others of its set have been drawn, whatever the weights. With a
    single set an epoch is one permutation.
    """
    drawn = [
        (which, index)
        for which, share in enumerate(shares)
        for index in _stream(len(sets[which].prompts), epoch * share, share, derive_seed(seed, "set", which))
    ]
    return [drawn[slot] for slot in _permutation(len(drawn), derive_seed(seed, "epoch", epoch))]


def _stream(size: int, start: int, count: int, seed: int) -> list[int]:
    """`count` entries, from `start` on, of the concatenated permutations of `size` items."""
    first, last = start // size, (start + count - 1) // size
    entries = [index for cycle in range(first, last + 1) for index in _permutation(size, derive_seed(seed, cycle))]
    return entries[start - first * size :][:count]


def _permutation(size: int, seed: int) -> list[int]:
    permutation: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return permutation
