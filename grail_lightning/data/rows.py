"""Rows of a table as prompts, which are made on access."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from grail_lightning.data.sources import DatasetSpec, Table, answers_in
from grail_lightning.tasks.base import Task
from grail_lightning.tasks.problem import Prompt


class RowPrompts(Sequence[Prompt]):
    """Selected rows of a table as prompts of a task. Only the indices are in memory; a table on disk stays on disk.

    The task gets the columns of problem and answer under the names `problem` and `answer`. `change` is applied to each
    prompt, such as a function that adds worked examples.
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
        if (problem := row.get(self.spec.problem)) is not None:
            row["problem"] = str(problem)
        if (answer := row.get(self.spec.answer)) is not None:
            # Several ones are one list, whose order does not matter.
            row["answer"] = ", ".join(map(str, answers_in(answer)))
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
    """The prompt that a task makes of a row. It is checked, because the task may be the user's own class."""
    prompt: Any = task.prompt(row)
    if not (
        isinstance(prompt, Prompt)
        and isinstance(prompt.reference, str)
        and isinstance(prompt.task, Task)
        and (isinstance(prompt.messages, str) or (prompt.messages and all(map(_is_turn, prompt.messages))))
    ):
        raise ValueError(
            f"`{type(task).__name__}.prompt` must return a `Prompt` of grail_lightning.tasks.base, whose `messages` "
            f'are text or a list of {{"role": …, "content": …}}, with a `reference` that is text and its `task`, '
            f"but got {prompt!s:.300}."
        )
    return prompt


def _is_turn(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
