"""Rows of a table as prompts, which are made on access, and worked examples that stand before them (few-shot)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np

from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.evaluated import unevaluated
from grail_lightning.answers.judge import judge
from grail_lightning.answers.records import ALTERNATIVE, Verdict
from grail_lightning.core.data.selection import answers_in
from grail_lightning.core.data.sources import DatasetSpec, Table, check_path
from grail_lightning.core.records.picture import Messages, has_pictures, pictures_in, with_pictures
from grail_lightning.core.records.task import Prompt, Task, is_message
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.tasks.answered import AnswerTask

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
            row["problem"] = problem if isinstance(problem, list) else self._text(problem, self.spec.problem)
        if (answer := row.get(self.spec.answer)) is not None:
            # Several formulas are one list, whose order does not matter; of several texts each is right.
            several = [self._text(item, self.spec.answer) for item in answers_in(answer)]
            if len(several) > 1 and isinstance(self.task, AnswerTask):
                several = [self.task.form.bare(worked).strip() for worked in several]
            row["answer"] = (", " if getattr(self.task, "compare", "math") == "math" else ALTERNATIVE).join(several)
        try:
            cells = self._pictures(row)
            draft = _prompt_of(self.task, row)
            if cells is not None or has_pictures(draft.messages):
                place, folder = self.table.place(self.indices[index]), self.table.folder
                messages = with_pictures(draft.messages, cells or [], place, folder)
                draft = dataclasses.replace(draft, messages=messages)
        except ValueError as error:  # The same one, which still tells where it was raised.
            place = self.table.place(self.indices[index])
            if type(error) is ValueError and not str(error).startswith(place):
                error.args = (f"{place}: {error}",)
            raise
        prompt = dataclasses.replace(draft, dataset=self.spec.label)
        return prompt if self.change is None else self.change(prompt)

    def _text(self, value: object, column: str) -> str:
        """A cell as text. A float32 of Arrow is read as 0.10000000149011612 where 0.1 was written."""
        feature = getattr(self.table.rows, "features", {}).get(column)
        dtype = getattr(getattr(feature, "feature", feature), "dtype", None)
        return str(np.dtype(dtype).type(value)) if dtype in ("float16", "float32") else str(value)

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
            pictures = [picture for prompt in part for picture in pictures_in(prompt.messages)]
            all(pool.map(lambda picture: bool(picture.open()), pictures))


def _prompt_of(task: Task, row: Mapping[str, Any]) -> Prompt:
    """The prompt that a task makes of a row. It is checked, because the task may be the user's own class."""
    prompt: Any = task.prompt(row)
    if not (
        isinstance(prompt, Prompt)
        and isinstance(prompt.reference, str)
        and isinstance(prompt.task, Task)
        and (isinstance(prompt.messages, str) or (prompt.messages and all(map(is_message, prompt.messages))))
    ):
        raise ValueError(
            f"`{type(task).__name__}.prompt` must return a `Prompt` of grail_lightning, whose `messages` "
            f'are text or a list of {{"role": …, "content": …}}, with a `reference` that is text and its `task`, '
            f"but got {prompt!s:.300}."
        )
    return prompt


@dataclass(frozen=True)
class FewShot:
    r"""Worked examples that stand before each question: the same for all, so that their tokens can be run once.

    They are the first rows of a dataset that fit its filter. Rows that serve as examples are left out of training and
    evaluation, because their prompt would contain their answer.

    Args:
        number: The number of examples.
        dataset: The dataset with the examples; default the first training dataset.
        solution: The column of the worked solution, which must end with the reference answer in the task's form.
        style: turns: each example is a user turn and an assistant turn of the conversation, for chat models. text: the
            prompt is plain text without a chat template, for base models.
        template: One example as plain text, for `text`. The question itself ends where `{solution}` stands.
    """

    number: int = 2
    dataset: DatasetSpec | str | None = None
    solution: str = "solution"
    style: Literal["turns", "text"] = "turns"
    template: str = "{problem}\n{solution}"

    def __post_init__(self) -> None:
        # Another style would be read as turns.
        check_options(self, "few_shot", number="[1, inf)", style=Literal["turns", "text"])
        if self.dataset is not None:
            spec = self.dataset if isinstance(self.dataset, DatasetSpec) else DatasetSpec(self.dataset)
            check_path(spec, "few_shot.dataset")
        if re.findall(r"\{(?:problem|solution)\}", self.template) != ["{problem}", "{solution}"]:
            raise ValueError(
                "`few_shot.template` must contain {problem} and after it {solution}, once each, but got "
                f"{self.template!r}."
            )


@dataclass(frozen=True)
class Example:
    """A problem, as the prompt that the task makes of the row, with its worked solution."""

    messages: Messages | str
    solution: str
    source: tuple[object, ...] = ()  # The dataset that it is a row of (`DatasetSpec.source`),
    row: int = 0  # and the index of this row.
    problem: tuple[object, object] = (None, None)  # Its `problem_and_answer`, which other datasets may have.


def read_examples(
    few_shot: FewShot, spec: DatasetSpec, table: Table, indices: Sequence[int], task: Task
) -> list[Example]:
    """The examples of a table: the first of the rows that fit its filter. Their solutions must end with the answer."""
    if len(indices) < few_shot.number:
        raise ValueError(
            f"`few_shot.number` must not exceed the {len(indices)} rows of {table.source}, but got {few_shot.number}."
        )
    examples, chosen = [], indices[: few_shot.number]
    for index, prompt in zip(chosen, RowPrompts(table, chosen, spec, task), strict=True):
        solution = table.rows[index].get(few_shot.solution)
        place = f"{table.place(index)}: the column `{few_shot.solution}`"
        answer = task.answer(solution) if isinstance(solution, str) else None
        if answer is None or not _agrees(task, prompt.reference, answer):
            raise ValueError(
                f"{place} (`few_shot.solution`) must be a text that ends with the answer {prompt.reference!r} in the "
                f"form that `task.answer` reads, but got the answer {answer!r} in {str(solution)[-80:]!r}."
            )
        same = problem_and_answer(table.rows[index], spec)
        examples.append(Example(prompt.messages, str(solution).strip(), spec.source, index, same))
    return examples


def problem_and_answer(row: Mapping[str, Any], spec: DatasetSpec) -> tuple[object, object]:
    """What makes a row that of an example, in whatever dataset it stands."""
    return row.get(spec.problem), row.get(spec.answer)


def _agrees(task: Task, reference: str, answer: str) -> bool:
    if task.compare != "math":
        relaxed = task.compare == "relaxed"
        return Verdict.of_text(reference, answer, ignore_case=task.compare != "exact", relaxed=relaxed).correct
    outcome = judge(reference, answer, Conventions())
    right = outcome is None or outcome.status == "right"  # None: only a worker could tell.
    return right and not (task.evaluated and unevaluated(reference, answer))


def with_examples(prompt: Prompt, examples: Sequence[Example], few_shot: FewShot) -> Prompt:
    """The prompt with worked examples before its question."""
    if has_pictures(prompt.messages) or any(has_pictures(example.messages) for example in examples):
        raise ValueError("`few_shot` takes prompts without pictures. Leave it out, or `images` of the dataset.")
    if few_shot.style == "text":
        opening, _, rest = few_shot.template.partition("{solution}")
        first, *others = (*(example.messages for example in examples), prompt.messages)
        messages = [first, *map(_without_system, others)]  # A system turn stands at the beginning, once.
        *worked, last = (opening.replace("{problem}", _text(opening_message)) for opening_message in messages)
        parts = [question + example.solution + rest for question, example in zip(worked, examples, strict=True)]
        # A trailing space would be a token of its own, which no model expects.
        text = last.rstrip(" ")
        return dataclasses.replace(prompt, messages="\n\n".join([*parts, text]))
    if isinstance(prompt.messages, str):
        raise ValueError(
            f"`few_shot.style: turns` needs prompts that are conversations, but those of `{type(prompt.task).__name__}`"
            " are plain text. Use `style: text`."
        )
    system = [message for message in prompt.messages if message["role"] == "system"]
    turns: Messages = []
    for example in examples:
        turns += _without_system(example.messages)
        turns.append({"role": "assistant", "content": example.solution})
    return dataclasses.replace(prompt, messages=[*system, *turns, *_without_system(prompt.messages)])


def _without_system(messages: Messages | str) -> Any:
    return messages if isinstance(messages, str) else [m for m in messages if m["role"] != "system"]


def _text(messages: Messages | str) -> str:
    return messages if isinstance(messages, str) else "\n".join(message["content"] for message in messages)
