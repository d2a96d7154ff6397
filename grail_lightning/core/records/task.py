"""The interface of tasks, and the records of a problem that a training step passes on: prompt, steps, rewards."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from grail_lightning.answers.find import find_boxes
from grail_lightning.answers.records import AnswerSpan, AnswerVerifier, Verdict
from grail_lightning.core.records.picture import Messages

GradedAnswer: TypeAlias = Verdict  # What a task is told of an answer: whether it is `correct`, and its `status`.
StepKind = Literal["sound", "slip", "misconception", "inherited", "filler"]
Comparison = Literal["math", "text", "exact", "relaxed"]


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

    total: Sequence[float | None]  # The reward of each response; None if nothing scores it.
    # The parts by name before weighting, which are logged; None if a part does not apply.
    values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    # The factors of these parts in the total, by name; 1 where it is not given.
    weights: Mapping[str, float] = field(default_factory=dict)
    # What is logged beside their means, as `rewards/<name>`: numbers of each response.
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)


class TokenText(str):
    """A prompt whose token ids are given, because its text may be tokenised in another way: a response to continue."""

    __slots__ = ("ids",)
    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> Self:
        """The text, for people, with its token ids."""
        instance = super().__new__(cls, text)
        instance.ids = tuple(ids)
        return instance


def is_message(message: object) -> bool:
    """Whether a value is a message of a conversation: a role, and a text or a list of texts and pictures."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(part, Mapping)
        and (part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str)))
        for part in parts
    )


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


# Half of float32's largest number: an advantage is a difference of two rewards, and is a float32.
LARGEST_REWARD = 1.7e38
REWARD = "environment_reward"  # The column with what `get_reward` returned; rewards can ask for it.
FUNCTION_REWARDS = "function_rewards"  # The column with what functions of TRL's form gave for an environment, by name.
FUNCTION_SHARES = "function_shares"  # The column with what is logged of their calls, by name.
EARNED = (REWARD, FUNCTION_REWARDS, FUNCTION_SHARES)  # Columns of a rollout rather than of its problem.
# Columns of a response that is given, which are no part of its problem, either.
GIVEN = ("response", "response_ids", "response_group", "response_turns", "prompt_ids", "episode", "finished")


def response_group(prompt: Prompt) -> object:
    """What neighbours with given responses have in common if they are one group; a prompt without is its own."""
    named = prompt.columns.get("response_group")
    return object() if "response" not in prompt.columns else prompt.messages if named is None else (named,)


def problem_id(prompt: Prompt) -> str:
    """The identity of a problem: 16 hexadecimal digits of a hash of dataset, messages and reference.

    Of a task that says so (`Task.reads_columns`) also of the problem's other columns, and of the repetitions before it.
    """
    told: tuple[object, ...] = (prompt.dataset, prompt.messages, prompt.reference)
    if prompt.task.reads_columns:
        columns = {name: repr(value) for name, value in prompt.columns.items() if name not in (*EARNED, *GIVEN)}
        told += (sorted(columns.items()),)
        told += (prompt.occurrence,)
    text = repr(told)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class Task(ABC):
    """The interface of tasks: the prompt of a problem, the answer in a response, and its reward.

    Attributes:
        reads_columns: Whether problems differ if their further columns do, such as tests, or the start of a game.
        compare: How an answer is compared with its reference. `math`: by the verifier. `exact`: as text, in which every
            run of white space is one space. `text`: in addition without regard to upper and lower case. `relaxed`: as
            `text`, but a number may differ by 5 % of the reference, as in ChartQA.
        evaluated: Whether an answer that could still be carried out, such as `7+5` for 12, is not right; with `math`.
    """

    compare: Comparison = "math"
    evaluated = False
    reads_columns = False
    has_environment = False  # Whether rollouts have several turns, in which an environment answers.
    reads_token_ids = False  # Whether `earn` takes the token ids of responses, by the name `ids`.
    takes_conversations = False  # Whether the `problem` of a row may be a list of messages, as TRL's `prompt` is.
    has_tools: bool = False  # Whether the policy can call a tool in its environment.
    optional_columns: Collection[str] = ()  # Those of `problem` and `answer` that a row may lack.

    def __init_subclass__(cls) -> None:
        """A class with its own `prompt`, which may read `problem` as text, says anew that it takes conversations."""
        super().__init_subclass__()
        if "prompt" in vars(cls) and "takes_conversations" not in vars(cls):
            cls.takes_conversations = False

    @staticmethod
    def make_verifier() -> AnswerVerifier:
        """What compares formulas; by default a `Verifier` with its usual conventions.

        A run calls it once for all tasks whose classes have the same function, and closes the verifier at its end.
        """
        from grail_lightning.answers.verifier import Verifier

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
    def reward(
        self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[GradedAnswer]
    ) -> Sequence[float | None]:
        """One reward for each response. It is called with all responses of a batch that belong to this task.

        None is no opinion: such a response is not trained on and is in no mean of rewards.
        """

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
