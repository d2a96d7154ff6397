"""Rows of a table as prompts, made when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from grail_lightning.data.sources import DatasetSpec, Table
from grail_lightning.tasks.base import Messages, Prompt, Task


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
        return dataclasses.replace(prompt_of(self.task, row), dataset=self.spec.label)

    def take(self, indices: Sequence[int]) -> RowPrompts:
        """The prompts of other rows of the same table."""
        return RowPrompts(self.table, indices, self.spec, self.task)


def prompt_of(task: Task, row: Mapping[str, Any]) -> Prompt:
    """The prompt that a task makes of a row, checked: a task may be anybody's.

    Raises:
        ValueError: If it is no `Prompt`, or if its messages, reference or task are something else.
    """
    prompt: Any = task.prompt(row)
    must = f"`{type(task).__name__}.prompt` must return a `Prompt`"
    if not isinstance(prompt, Prompt):
        raise ValueError(
            f"{must}, but got {type(prompt).__name__}. Return `Prompt(messages=…, reference=…, task=self)`, of "
            "grail_lightning.tasks.base."
        )
    if not isinstance(prompt.messages, str) and not _is_conversation(prompt.messages):
        raise ValueError(
            f'{must} whose `messages` are text or a list of {{"role": …, "content": …}} with two strings each, but got '
            f"{str(prompt.messages)[:120]}."
        )
    if not isinstance(prompt.reference, str):
        raise ValueError(
            f"{must} whose `reference` is a string, but got {type(prompt.reference).__name__} "
            f"({str(prompt.reference)[:80]}). Use `str`."
        )
    if not isinstance(prompt.task, Task):
        raise ValueError(f"{must} whose `task` grades it, but got {type(prompt.task).__name__}. Give it `task=self`.")
    return prompt


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        and all(isinstance(m.get("content"), str) for m in messages)
    )


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
