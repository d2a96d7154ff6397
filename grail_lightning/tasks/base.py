"""What a problem is: the records that a task makes of it, and the interface of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

StepKind = Literal["sound", "slip", "misconception", "inherited", "filler"]
Messages = list[dict[str, str]]


class GradedAnswer(Protocol):
    """What a task sees of a verdict: `grail_lightning.answers.Verdict` has these fields, and more."""

    @property
    def correct(self) -> bool:
        """Whether the answer equals the reference."""

    @property
    def status(self) -> str:
        """One of right, wrong, missing, capped, unparseable, timeout, crashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A range of characters of a response and what the task knows about it.

    ``slip``: wrong, at random. ``misconception``: wrong, in a systematic way. ``inherited``: right in itself, but
    computed from an earlier wrong result. ``filler``: carries no reasoning. ``result`` is the range of the characters
    in which the error shows, if any (for ``7+5=13`` the ``13``).
    """

    start: int
    stop: int
    kind: StepKind
    result: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Earned:
    """What responses earned.

    Attributes:
        total: One finite number a response: its reward.
        values: The parts of it by name, before weighting; None where a part has no opinion. They are logged.
    """

    total: list[float]
    values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


class Task(ABC):
    """What a problem is: its prompt, how an answer is read from a text, and what it earns."""

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """One dataset row as a prompt that carries this task."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """The bare answer that a response gives, without its box; None if it gives none."""

    @abstractmethod
    def reward(self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[GradedAnswer]) -> list[float]:
        """One reward a response. Called for all responses of one batch that belong to this task."""

    def earn(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int],
    ) -> Earned:
        """What the trainer asks: `reward`, and its parts where a task has several.

        Args:
            texts: The responses of one batch that belong to this task.
            prompts: One a response.
            verdicts: One a response.
            lengths: Generated tokens of each, the end token included.
        """
        return Earned(total=self.reward(texts, prompts, verdicts))

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """The steps of a response with their labels, where the task can tell them; else None."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem as it is put to the policy. The task travels with it, so mixed datasets grade themselves.

    Attributes:
        messages: A conversation (``[{"role": …, "content": …}]``, through the chat template) or plain text.
        reference: The bare reference answer.
        task: Grades the responses.
        columns: Further columns of the dataset row, for rewards and tables.
        dataset: Under which name metrics are reported.
    """

    messages: Messages | str
    reference: str
    task: Task
    columns: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""

    def to(self, device: Any) -> Self:
        """Itself: no tensors inside. Lightning moves what has this method, and refuses other frozen records."""
        return self
