"""Worked examples before each question (few-shot prompts), taken from rows of a dataset."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grail_lightning.answers import Conventions, Verdict
from grail_lightning.answers.judge import judge
from grail_lightning.data.rows import RowPrompts
from grail_lightning.data.sources import DatasetSpec, Table, check_path
from grail_lightning.picture import has_pictures
from grail_lightning.runtime.checks import check_options
from grail_lightning.tasks.base import Messages, Prompt, Task


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
            check_path(self.dataset if isinstance(self.dataset, DatasetSpec) else DatasetSpec(self.dataset))
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
    return outcome is None or outcome.status == "right"  # None: only a worker could tell.


def with_examples(prompt: Prompt, examples: Sequence[Example], few_shot: FewShot) -> Prompt:
    """The prompt with worked examples before its question."""
    if has_pictures(prompt.messages) or any(has_pictures(example.messages) for example in examples):
        raise ValueError("`few_shot` takes prompts without pictures. Leave it out, or `images` of the dataset.")
    if few_shot.style == "text":
        opening, _, rest = few_shot.template.partition("{solution}")
        first, *others = (*(example.messages for example in examples), prompt.messages)
        messages = [first, *map(_without_system, others)]  # A system turn stands at the beginning, once.
        *worked, last = (opening.replace("{problem}", _text(own)) for own in messages)
        parts = [one + example.solution + rest for one, example in zip(worked, examples, strict=True)]
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
