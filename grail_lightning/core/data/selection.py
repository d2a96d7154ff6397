"""The rows of a table that a dataset takes, and what stands in their cells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grail_lightning.core.data.sources import DatasetSpec, Table
from grail_lightning.core.records.task import Task
from grail_lightning.core.runtime.pages import page


def with_prompt_column(spec: DatasetSpec, table: Table, task: Task) -> DatasetSpec:
    """The dataset with TRL's column `prompt` as its problem, if it has none of the name `problem`.

    A task that does without `problem`, and does not say that it takes conversations, reads such a column itself.
    """
    columns = table.rows[0]
    reads = task.takes_conversations or "problem" not in task.optional_columns
    taken = reads and spec.problem == "problem" and "problem" not in columns and "prompt" in columns
    return replace(spec, problem="prompt") if taken else spec


def select_rows(table: Table, spec: DatasetSpec, task: Task) -> list[int]:
    """The indices of the rows that `spec` selects, ascending, with what the task needs of problem and answer."""
    optional = task.optional_columns
    where = spec.where or {}
    columns = {"problem": spec.problem, "answer": spec.answer}
    needed = [column for name, column in columns.items() if name not in optional]
    named = [column for name, column in columns.items() if column != name]  # It may be empty, but not missing.
    selected: list[int] = []
    passed = 0
    for index, row in enumerate(table.columns([spec.problem, spec.answer, *where])):
        place = table.place(index)
        missing = [column for column in (*needed, *named, *where) if column not in row]
        if missing:
            there = getattr(table.rows, "column_names", None) or list(row)
            raise ValueError(
                f"{place}: there is no column `{missing[0]}`. The columns are: {', '.join(map(str, there))}. Name "
                "the right one with `problem`, `answer` or `where` of the dataset. `EnvironmentTask` needs no answer "
                "if its environment has a method `get_reward`, or if `task.rewards` are functions in TRL's form, also "
                f"without an environment ({page('reference/from_trl.md')}); a task of your own that does without says "
                "so with its attribute `optional_columns`."
            )
        if all(_fits(row[column], wanted, f"{place}: `{column}`") for column, wanted in where.items()):
            passed += 1
            if passed <= spec.skip:
                continue
            messages = task.takes_conversations and _has_messages(row.get(spec.problem))  # The task checks them.
            if not messages and (spec.problem in needed or row.get(spec.problem) is not None):
                _check_text(row[spec.problem], f"{place}: `{spec.problem}`")
            if spec.answer in needed or row.get(spec.answer) is not None:
                for answer in answers_in(row[spec.answer]) or [None]:
                    _check_text(answer, f"{place}: `{spec.answer}`")
            selected.append(index)
            if len(selected) == spec.limit:
                break
    if not selected:
        seen = {c: sorted({repr(row[c]) for row in table.columns(list(where))})[:5] for c in where}
        if passed:
            raise ValueError(
                f"`skip` must leave a row of {table.source}, but got {spec.skip} of {passed}. Give a smaller number."
            )
        raise ValueError(f"No row of {table.source} fits `where` {where}. Values that occur: {seen}.")
    return selected


def answers_in(value: object) -> list[object]:
    """The answers that a cell holds: those of a list, such as OlympiadBench's `final_answer`, or the one that it is."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _has_messages(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(message, Mapping) for message in value)


def _check_text(value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        advice = "A task of your own can read its parts, or messages of a conversation (`optional_columns`, "
        advice += f"`takes_conversations`, {page('problems.md')})."
        if not isinstance(value, list | tuple | Mapping):
            kind = type(value).__name__
            advice = f"This is a value of the type {kind}: write the column as text, as `astype(str)` of pandas does."
        raise ValueError(f"{place} must be text or a number, but got {value!r:.80}. {advice}")
    if value is None or not str(value).strip() or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(
            f"{place} must be text that is not empty, or a finite number, but got {value!r}. Fill it in, remove the "
            "row, or leave it out by `where`."
        )


def _fits(value: Any, wanted: object, place: str) -> bool:
    if isinstance(wanted, list | tuple):
        return value in wanted
    if not isinstance(wanted, Mapping):
        return bool(value == wanted)
    try:
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    except TypeError as error:
        raise ValueError(f"{place} must be comparable with {dict(wanted)}, but got {value!r:.80} ({error}).") from None
