"""The records of a problem, which a training step passes on: the prompt with its task, labelled steps, and rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from grail_lightning.tasks.base import Task

StepKind = Literal["sound", "slip", "misconception", "inherited", "filler"]
Comparison = Literal["math", "text", "exact", "relaxed"]
Messages = list[dict[str, Any]]  # The content is text, or a list of parts of which some are pictures.


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A range of characters of a response, with its kind.

    A ``slip`` is wrong at random, a ``misconception`` is wrong in a systematic way, an ``inherited`` step is right in
    itself but computed from an earlier wrong result, a ``sound`` step is right, and ``filler`` carries no reasoning.
    ``result`` is the range of the characters in which an error is visible, if any (for ``7+5=13`` the ``13``).
    """

    start: int
    stop: int
    kind: StepKind
    result: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskReward:
    """The rewards of responses."""

    total: list[float]  # The reward of each response.
    # The parts by name before weighting, which are logged; None if a part does not apply.
    values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


class TokenText(str):
    """A prompt whose token ids are given, because its text may be tokenised in another way: a response to continue."""

    __slots__ = ("ids",)
    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> Self:
        """The text, for people, with its token ids."""
        made = super().__new__(cls, text)
        made.ids = tuple(ids)
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The input of the policy for one problem. It refers to its task, so that mixed datasets can be graded.

    Attributes:
        messages: A conversation (``[{"role": …, "content": …}]``, through the chat template) or plain text.
        reference: The bare reference answer.
        task: The task, which grades the responses.
        columns: Further columns of the dataset row, for rewards and tables.
        dataset: The name under which metrics are reported.
        occurrence: The number of equal problems before this one in an evaluation; counted in environments alone.
    """

    messages: Messages | str
    reference: str
    task: Task
    columns: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    occurrence: int = 0

    def to(self, device: object) -> Self:
        """The prompt itself, which has no tensors. Lightning rejects a frozen record without this method."""
        return self


REWARD = "environment_reward"  # The column with what `get_reward` returned; rewards can ask for it.


def response_group(prompt: Prompt) -> object:
    """What neighbours with given responses have in common if they are one group; a prompt without is its own."""
    named = prompt.columns.get("response_group")
    return object() if "response" not in prompt.columns else prompt.messages if named is None else (named,)


def problem_id(prompt: Prompt) -> str:
    """The identity of a problem: 16 hexadecimal digits of a hash of dataset, messages and reference.

    Of a task that says so (`Task.reads_columns`) also of the other columns, and of the repetitions before it.
    """
    told: tuple[object, ...] = (prompt.dataset, prompt.messages, prompt.reference)
    if prompt.task.reads_columns:
        told += (sorted((name, repr(value)) for name, value in prompt.columns.items() if name != REWARD),)
        told += (prompt.occurrence,)
    text = repr(told)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
