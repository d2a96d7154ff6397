"""Rows of a table as prompts, which are made on access."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from grail_lightning.answers.records import ALTERNATIVE
from grail_lightning.data.sources import DatasetSpec, Table, answers_in
from grail_lightning.picture import has_pictures, pictures_in, with_pictures
from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Prompt, Task

_AT_ONCE = 256  # The rows whose pictures are in memory while they are checked.


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
            # Several formulas are one list, whose order does not matter; of several texts each is right.
            several = [*map(str, answers_in(answer))]
            if len(several) > 1 and isinstance(self.task, AnswerTask):
                several = [self.task.form.bare(worked).strip() for worked in several]
            row["answer"] = (", " if getattr(self.task, "compare", "math") == "math" else ALTERNATIVE).join(several)
        try:
            cells = self._pictures(row)
            made = _prompt_of(self.task, row)
            if cells is not None or has_pictures(made.messages):
                place, folder = self.table.place(self.indices[index]), self.table.folder
                messages = with_pictures(made.messages, cells or [], place, folder)
                made = dataclasses.replace(made, messages=messages)
        except ValueError as error:  # The same one, which still tells where it was raised.
            place = self.table.place(self.indices[index])
            if type(error) is ValueError and not str(error).startswith(place):
                error.args = (f"{place}: {error}",)
            raise
        prompt = dataclasses.replace(made, dataset=self.spec.label)
        return prompt if self.change is None else self.change(prompt)

    def _pictures(self, row: dict[str, Any]) -> list[object] | None:
        """The cells of the pictures of a row, which are taken out of it; None if the dataset has none."""
        if self.spec.images is None:
            return None
        if self.spec.images not in row:
            raise ValueError(f"there is no column `{self.spec.images}`. The columns are: {', '.join(map(str, row))}.")
        cell = row.pop(self.spec.images)
        return [] if cell is None else list(cell) if isinstance(cell, list | tuple) else [cell]

    def take(self, indices: Sequence[int]) -> RowPrompts:
        """The prompts of the given rows of the same table."""
        return RowPrompts(self.table, indices, self.spec, self.task, self.change)


def check_pictures(prompts: Sequence[Prompt]) -> None:
    """Read the pixels of all pictures of a table, so that a broken one is named before a model is loaded."""
    if not isinstance(prompts, RowPrompts) or prompts.spec.images is None:
        return
    with ThreadPoolExecutor() as pool:  # Pillow decodes outside of Python's lock.
        for start in range(0, len(prompts), _AT_ONCE):
            part = prompts[start : start + _AT_ONCE]
            shown = [picture for prompt in part for picture in pictures_in(prompt.messages)]
            all(pool.map(lambda picture: bool(picture.open()), shown))


def _prompt_of(task: Task, row: Mapping[str, Any]) -> Prompt:
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
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(part, dict)
        and (part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str)))
        for part in parts
    )
