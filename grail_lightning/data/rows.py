"""Rows of a table as prompts, which are made on access."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from grail_lightning.data.sources import DatasetSpec, Table, answers_in
from grail_lightning.tasks.base import Prompt, Task


class RowPrompts(Sequence[Prompt]):
    """Selected rows of a table as prompts of a task. Only the indices are in memory; a table on disk stays on disk.

    Args:
        table: The table.
        indices: The indices of the selected rows.
        spec: The names of the columns and of the dataset.
        task: The task that makes a prompt of a row. It gets the columns under the names `problem` and `answer`.
        change: A function that is applied to each prompt, such as one that adds worked examples; None for none.
    """

    def __init__(
        self,
        table: Table,
        indices: Sequence[int],
        spec: DatasetSpec,
        task: Task,
        change: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        self.table, self.indices, self.spec, self.task, self.change = table, indices, spec, task, change

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
        answers = answers_in(row[self.spec.answer])  # Several ones are one list, whose order does not matter.
        row |= {"problem": str(row[self.spec.problem]), "answer": ", ".join(map(str, answers))}
        try:
            made = prompt_of(self.task, row)
        except ValueError as error:  # The same one, which still tells where it was raised.
            if type(error) is ValueError:
                error.args = (f"{self.table.place(self.indices[index])}: {error}",)
            raise
        prompt = dataclasses.replace(made, dataset=self.spec.label)
        return prompt if self.change is None else self.change(prompt)

    def take(self, indices: Sequence[int]) -> RowPrompts:
        """The prompts of the given rows of the same table."""
        return RowPrompts(self.table, indices, self.spec, self.task, self.change)


def prompt_of(task: Task, row: Mapping[str, Any]) -> Prompt:
    """The prompt that a task makes of a row. It is checked, because the task may be the user's own class.

    Raises:
        ValueError: If it is no `Prompt`, or if its messages, reference or task have the wrong type.
    """
    prompt: object = task.prompt(row)
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
    reference: object = prompt.reference
    if not isinstance(reference, str):
        raise ValueError(
            f"{must} whose `reference` is a string, but got {type(reference).__name__} ({str(reference)[:80]}). "
            "Use `str`."
        )
    grader: object = prompt.task
    if not isinstance(grader, Task):
        raise ValueError(f"{must} whose `task` grades it, but got {type(grader).__name__}. Give it `task=self`.")
    return prompt


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        and all(isinstance(m.get("content"), str) for m in messages)
    )
