"""The interface of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from grail_lightning.answers import AnswerSpan, AnswerVerifier, Verifier, find_boxes
from grail_lightning.answers.records import Verdict
from grail_lightning.tasks.problem import Comparison, Messages, Prompt, Step, StepKind, TaskReward, TokenText

__all__ = ["Comparison", "GradedAnswer", "Messages", "Prompt", "Step", "StepKind", "Task", "TaskReward", "TokenText"]


GradedAnswer: TypeAlias = Verdict  # What a task is told of an answer: whether it is `correct`, and its `status`.


class Task(ABC):
    """The interface of tasks: the prompt of a problem, the answer in a response, and its reward.

    Attributes:
        reads_columns: Whether problems differ if their further columns do, such as tests, or the start of a game.
        compare: How an answer is compared with its reference. `math`: by the verifier. `exact`: as text, in which every
            run of white space is one space. `text`: in addition without regard to upper and lower case. `relaxed`: as
            `text`, but a number may differ by 5 % of the reference, as in ChartQA.
    """

    compare: Comparison = "math"
    reads_columns = False
    has_environment = False  # Whether rollouts have several turns, in which an environment answers.
    optional_columns: Collection[str] = ()  # Those of `problem` and `answer` that a row may lack.

    @staticmethod
    def make_verifier() -> AnswerVerifier:
        """What compares formulas; by default a `Verifier` with its usual conventions.

        A run calls it once for all tasks whose classes have the same function, and closes the verifier at its end.
        """
        return Verifier()

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a dataset row, which refers to this task."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> str:
        """A remark on the prompts of a dataset, all of which are there before a model is loaded; here none."""
        return ""

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

    def verdict(self, prompt: Prompt) -> Verdict | None:
        """The verdict of a rollout that needs no comparison; None compares its answer with the reference."""
        return None

    def verdicts(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> Sequence[Verdict | None]:
        """The verdicts of all responses of a batch that belong to this task; by default what `verdict` returns.

        A task that judges responses itself, such as by running them, says here what became of each.
        """
        return [self.verdict(prompt) for prompt in prompts]

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """The labelled steps of a response; None if the task cannot label them."""
        return None
