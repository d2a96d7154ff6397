"""Tasks whose responses state an answer in some form: the base class, and the task of text problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from grail_lightning.answers.find import AnswerForm, Boxed, Pattern
from grail_lightning.answers.records import AnswerSpan
from grail_lightning.core.records.picture import Messages, add_text, as_text
from grail_lightning.core.records.task import Comparison, GradedAnswer, Prompt, Task, TaskReward, is_message
from grail_lightning.core.runtime.pages import page
from grail_lightning.core.tasks.rewards import (
    Reward,
    Rewards,
    RewardSpec,
    RewardValues,
    TRLRollouts,
    Values,
    ends_with_answer,
)


class AnswerTask(Task):
    r"""The base class of tasks whose responses state an answer. A subclass implements `prompt`.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0. From Python also functions.
        answer: The form in which a response states its answer; default the last complete `\boxed{...}`.
        compare: How answer and reference are compared: math by the verifier; text, exact and relaxed see `Task`.
    """

    def __init__(
        self, rewards: Rewards | None = None, answer: AnswerForm | None = None, compare: Comparison = "math"
    ) -> None:
        if compare not in get_args(Comparison):
            raise ValueError(f"`compare` must be one of {', '.join(get_args(Comparison))}, but got {compare!r}.")
        self.form, self.compare = answer or Boxed(), compare
        self.evaluated = self.form.evaluated
        if rewards is not None and not rewards:
            raise ValueError("`rewards` must name at least one reward, but got []. Leave it out for `correctness`.")
        if self.evaluated and compare != "math":
            raise ValueError(
                "`compare` must be math with `evaluated: true` of the answer's form, since only numbers are worked "
                f"out, but got {compare!r}. Leave out one of them ({page('reference/grading.md')})."
            )
        self.rewards = [Reward(spec) for spec in rewards or [RewardSpec(function="correctness")]]
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"`rewards` must have different names, but got {names}. Give one of them a `name`.")
        self.reads_token_ids = self.has_trl_rewards

    @property
    def has_trl_rewards(self) -> bool:
        """Whether one of the rewards has TRL's form."""
        return any(reward.is_trl for reward in self.rewards)

    def check_length(self, max_response_length: int) -> None:
        """Check that no overlong penalty is 0 for all responses of at most this length."""
        for reward in self.rewards:
            free = reward.arguments["limit"] - reward.arguments["buffer"] if reward.path == "overlong" else 0
            if free >= max_response_length:
                raise ValueError(
                    f"The reward `{reward.name}` must begin below the longest response, `sampling.max_response_length` "
                    f"{max_response_length}, but got limit - buffer = {free}. Set `limit` to {max_response_length}."
                )

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the data has the columns that the rewards ask for."""
        if type(self).reward is AnswerTask.reward:  # A subclass's own is used instead of the list.
            for reward in self.rewards:
                reward.check_columns(columns)

    def answer(self, text: str) -> str | None:
        """The content of the last answer, without outer white space."""
        return self.form.last(text)

    def answer_spans(self, text: str) -> list[AnswerSpan]:
        """The answers of a response in order of appearance; the last one is graded."""
        return self.form.find(text)

    def reward(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
    ) -> Sequence[float | None]:
        """The weighted sum of the rewards of each response, None if nothing scores it; see `reward_values`."""
        return weighted_sums(self.rewards, self.reward_values(texts, prompts, verdicts, lengths))

    def earn(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int],
        ids: Sequence[Sequence[int]] | None = None,
    ) -> TaskReward:
        """The weighted sums and their parts, or the values of a subclass's own `reward`."""
        if type(self).reward is not AnswerTask.reward:
            return super().earn(texts, prompts, verdicts, lengths)
        values = self.reward_values(texts, prompts, verdicts, lengths, ids)
        shares = {
            f"{name}/{what}": [share] * len(texts)
            for name, of_one in values.items()
            if isinstance(of_one, RewardValues)
            for what, share in of_one.shares.items()
        }
        weights = {reward.name: reward.weight for reward in self.rewards}
        return TaskReward(total=weighted_sums(self.rewards, values), values=values, weights=weights, shares=shares)

    def reward_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Values]:
        """The values of each reward for all responses, by the reward's name and before weighting.

        `lengths` are the numbers of generated tokens, and `ids` these tokens, which functions in TRL's form can ask
        for; without them a reward that needs them raises.
        """
        ours = {"responses", "references", "lengths"}
        names = [name for name in dict.fromkeys(n for prompt in prompts for n in prompt.columns) if name not in ours]
        columns: dict[str, Sequence[Any]] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        outside = self.trl_values(texts, prompts, columns, ids)
        # None also for a last turn that calls a tool, whose verdict is "missing" whatever its text says.
        pairs = zip(map(self.answer, texts), verdicts, strict=True)
        answers = [None if answer and verdict.status == "missing" else answer for answer, verdict in pairs]
        answers_and_texts = zip(answers, texts, strict=True)
        ends = [a is not None and ends_with_answer(text, self.answer_spans(text)) for a, text in answers_and_texts]
        columns |= {
            "correct": [verdict.correct for verdict in verdicts],
            "status": [verdict.status for verdict in verdicts],
            "answers": answers,
            "ends_with_answer": ends,
        }
        if lengths is not None:
            columns["lengths"] = lengths
        references = [prompt.reference for prompt in prompts]
        plain_rewards = [reward for reward in self.rewards if not reward.is_trl]
        started = {reward.name: reward.start(texts, references, columns) for reward in plain_rewards}
        values = {name: finish() for name, finish in (started | outside).items()}
        return {reward.name: values[reward.name] for reward in self.rewards}

    def trl_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        columns: Mapping[str, Sequence[Any]],
        ids: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Callable[[], Values]]:
        """The calls of the rewards in TRL's form, by name, which give their values when they are asked."""
        chats = [isinstance(prompt.messages, list) for prompt in prompts]
        turns = [[{"role": "assistant", "content": t}] if chat else t for t, chat in zip(texts, chats, strict=True)]
        prompt_messages = [prompt.messages for prompt in prompts]
        rollouts = TRLRollouts(prompt_messages, turns, ids, columns)
        return {reward.name: reward.start_trl(rollouts) for reward in self.rewards if reward.is_trl}


def weighted_sums(rewards: Sequence[Reward], values: Mapping[str, Values]) -> Values:
    """``Σ_k weight_k · value_ki`` of each response; None adds nothing, and a sum of nothing is None.

    A reward of weight 0 is there to be logged: it scores no response, unless all have this weight.
    """
    counted = [reward for reward in rewards if reward.weight] or rewards
    rows = zip(*(values[reward.name] for reward in counted), strict=True)
    terms = ([r.weight * v for r, v in zip(counted, row, strict=True) if v is not None] for row in rows)
    return [math.fsum(of_row) if of_row else None for of_row in terms]


class MathTask(AnswerTask):
    r"""A problem and an instruction as one user turn, and the form in which the answer is expected.

    Args:
        instruction: The text that is appended to the problem, including its leading space; default that of the answer's
            form, for a box the sentence of the published runs. Of a conversation it is appended to the last message.
        system_prompt: The text of a system turn before the user turn; none by default. An error if a row's conversation
            has one of its own.
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.
        answer: The form of the answer: `Boxed` (default), `LastNumber`, `Marker`, `Pattern`, or a class of your own.
        compare: How answer and reference are compared: math by the verifier; text as text, without regard to case and
            to the amount of white space; exact as text, with regard to case; relaxed as text, but a number may differ
            by 5 % of the reference (ChartQA).
    """

    takes_conversations = True

    def __init__(
        self,
        instruction: str | None = None,
        system_prompt: str | None = None,
        rewards: Rewards | None = None,
        answer: AnswerForm | None = None,
        compare: Comparison = "math",
    ) -> None:
        super().__init__(rewards, answer, compare)
        for name, text in (("instruction", instruction), ("system_prompt", system_prompt)):
            if text is not None and "\b" in text:
                raise ValueError(
                    rf"`{name}` must not hold a backspace character, but got {text!r}. Inside double quotes `\b` is "
                    r"one: write `\\boxed`, or use single quotes."
                )
        if instruction is None and isinstance(self.form, Pattern):
            raise ValueError(
                "`instruction` must be given with `answer: Pattern`, because a pattern cannot be put into words. Say "
                "after the problem how the answer is to be written, or give '' if worked examples show it."
            )
        self.instruction = self.form.instruction if instruction is None else instruction
        self.system_prompt = system_prompt

    def instruction_of(self, row: Mapping[str, Any]) -> str:
        """The text that is appended to the problem of a row."""
        return self.instruction

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of the columns `problem` and `answer` of a row; it keeps all columns.

        The problem is a text, or a conversation that ends with a message of the user, as TRL's `prompt`, which takes
        its place where there is no `problem`.
        """
        problem = row.get("problem", row.get("prompt"))
        if problem is None or "answer" not in row:
            raise ValueError(f"A row must have the columns `problem` and `answer`, but got only {sorted(row)}.")
        instruction, columns = self.instruction_of(row), dict(row)
        if isinstance(problem, list):
            messages = read_conversation(problem)
            columns["problem"] = as_text(messages[-1]["content"])
            messages[-1]["content"] = add_text(messages[-1]["content"], instruction)
        else:
            messages = [{"role": "user", "content": f"{problem}{instruction}"}]
        if self.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise ValueError(
                    "`system_prompt` of the task and a message of the system in a row's prompt exclude each other, but "
                    f"got {self.system_prompt[:60]!r} and {as_text(messages[0]['content'])[:60]!r}. Leave out one."
                )
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        reference = self.form.bare(str(row["answer"])).strip()
        return Prompt(messages=messages, reference=reference, task=self, columns=columns)


def read_conversation(given: Sequence[Any]) -> Messages:
    """A copy of a conversation that a policy can go on with; a ValueError if it is none.

    Fields of a message that are None are left out: a table has the same fields for all messages.
    """
    wanted = (
        'A prompt that is a conversation must be a list of messages, {"role": "user", "content": "…"}, of which the '
        "last is the user's,"
    )
    messages: Messages = []
    for message in given:
        if not is_message(message):
            raise ValueError(f"{wanted} but got {str(message)[:200]}.")
        fields = {name: value for name, value in message.items() if value is not None}
        parts = fields["content"]
        messages.append(fields | {"content": [dict(part) for part in parts] if isinstance(parts, list) else parts})
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"{wanted} but got {str(messages[-1] if messages else [])[:200]} at its end.")
    return messages
