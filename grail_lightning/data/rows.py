"""Rows of a table as prompts, made when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, overload

from grail_lightning.data.sources import DatasetSpec, Table
from grail_lightning.rollout import Messages, Prompt, Task


class RowPrompts(Sequence[Prompt]):
    """Selected rows of a table as prompts of a task. Only the indices are held: a table on disk stays there.

    Args:
        table: The rows.
        indices: Which of them.
        spec: Names the columns and the dataset.
        task: Makes a prompt of a row; it sees the columns under the names `problem` and `answer`.
    """

    def __init__(self, table: Table, indices: Sequence[int], spec: DatasetSpec, task: Task) -> None:
        self.table, self.indices, self.spec, self.task = table, indices, spec, task

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> RowPrompts: ...

    def __getitem__(self, index: int | slice) -> Prompt | RowPrompts:
        if isinstance(index, slice):
            return self.take(self.indices[index])
        row = dict(self.table.rows[self.indices[index]])
        row |= {"problem": str(row[self.spec.problem]), "answer": str(row[self.spec.answer])}
        return dataclasses.replace(self.task.prompt(row), dataset=self.spec.label)

    def take(self, indices: Sequence[int]) -> RowPrompts:
        """The prompts of other rows of the same table."""
        return RowPrompts(self.table, indices, self.spec, self.task)


def within_length(
    prompts: RowPrompts,
    encode: Callable[[Messages | str], Sequence[int]],
    max_prompt_length: int,
    overlong: Literal["drop", "error"],
) -> RowPrompts:
    """The prompts of at most `max_prompt_length` tokens.

    Args:
        prompts: All of them.
        encode: Messages -> token ids, as the policy gets them.
        max_prompt_length: In tokens.
        overlong: `drop` leaves longer ones out, `error` raises for the first.

    Raises:
        ValueError: If one is too long and that is an error, or all are.
    """
    kept, shortest = [], None
    for number, index in enumerate(prompts.indices):
        length = len(encode(prompts[number].messages))
        shortest = length if shortest is None else min(shortest, length)
        if length <= max_prompt_length:
            kept.append(index)
        elif overlong == "error":
            raise ValueError(
                f"{prompts.table.place(index)}: the prompt has {length} tokens, but `max_prompt_length` is "
                f"{max_prompt_length}. Raise it, or leave such rows out with `overlong: drop`."
            )
    if not kept:
        raise ValueError(
            f"Every prompt of {prompts.table.source} is longer than `max_prompt_length` {max_prompt_length}; "
            f"the shortest has {shortest} tokens. Raise it."
        )
    return prompts.take(kept)
