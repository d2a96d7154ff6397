"""The interface of tasks, and the records of prompts, steps and rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from grail_lightning.answers import AnswerSpan, find_boxes

StepKind = Literal["sound", "slip", "misconception", "inherited", "filler"]
Comparison = Literal["math", "text", "exact"]
Messages = list[dict[str, str]]


class GradedAnswer(Protocol):
    """The part of a verdict that a task uses. `grail_lightning.answers.Verdict` has these fields, and more."""

    @property
    def correct(self) -> bool:
        """Whether the answer equals the reference."""

    @property
    def status(self) -> str:
        """One of right, wrong, missing, capped, unparseable, timeout, crashed."""


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


class Task(ABC):
    """The interface of tasks: the prompt of a problem, the answer in a response, and its reward.

    Attributes:
        compare: How an answer is compared with its reference. `math`: by the verifier. `exact`: as text, in which every
            run of white space is one space. `text`: in addition without regard to upper and lower case.
    """

    compare: Comparison = "math"

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a dataset row, which refers to this task."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """The answer of a response, without what marks it; None if there is none."""

    def answer_spans(self, text: str) -> list[AnswerSpan]:
        """The ranges of the answers in a response, in order of appearance: their tokens are the answer's for credit.

        By default these are the complete boxes. A task whose `answer` reads something else says here where it stands.
        """
        return find_boxes(text)

    @abstractmethod
    def reward(self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[GradedAnswer]) -> list[float]:
        """One reward for each response. It is called with all responses of a batch that belong to this task."""

    def earn(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int],
    ) -> TaskReward:
        """The rewards that the trainer uses: those of `reward`, and their parts if a task has several.

        `lengths` are the numbers of generated tokens, the end token included.
        """
        return TaskReward(total=self.reward(texts, prompts, verdicts))

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """The labelled steps of a response; None if the task cannot label them."""
        return None


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
    """

    messages: Messages | str
    reference: str
    task: Task
    columns: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""

    def to(self, device: object) -> Self:
        """The prompt itself, which has no tensors. Lightning rejects a frozen record without this method."""
        return self
