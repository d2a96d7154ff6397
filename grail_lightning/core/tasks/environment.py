"""The task whose rollouts have several turns, in which the policy calls the tools of an environment."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from grail_lightning.answers.find import AnswerForm
from grail_lightning.answers.records import UNSCORED, Verdict
from grail_lightning.core.environments.calls import CallLimits
from grail_lightning.core.environments.dialogue import CallFormat, Dialect, Encode, describe, find_dialect
from grail_lightning.core.environments.tools import ResultFormat, ToolSet, check_columns, trial_environment
from grail_lightning.core.records.episode import EpisodeLimits
from grail_lightning.core.records.picture import Picture, PictureEncoder
from grail_lightning.core.records.task import (
    FUNCTION_REWARDS,
    FUNCTION_SHARES,
    REWARD,
    Comparison,
    GradedAnswer,
    Prompt,
)
from grail_lightning.core.runtime.import_path import import_function
from grail_lightning.core.tasks.answered import MathTask, weighted_sums
from grail_lightning.core.tasks.rewards import Rewards, RewardSpec, RewardValues, TRLRollouts, Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tools: TypeAlias = Sequence[str | Callable[..., Any]]
else:  # What YAML can say.
    Tools: TypeAlias = list[str]


class Environment(ABC):  # noqa: B024  (a class is one by what it has)
    """What a class needs to be an environment, as TRL's `environment_factory` takes it; it inherits nothing.

    - ``reset(**row)`` begins a rollout with the columns of the dataset's row. A text that it returns is appended to
      the last message of the prompt. If its signature names ``seed``, it is given 63 bits for its random numbers, keyed
      by the run's seed, the training step and the prompt: all rollouts of a group are given the same, so that they play
      the same problem. If it names ``images``, it is given the pictures of the prompt as Pillow's images.
    - Every other public method is a tool. It has type hints and a docstring in Google's style, from which the policy is
      told what it does. The policy is told ``str`` of what it returns; an exception becomes a text, too. An image
      of Pillow, or a list of texts and images, is shown to a policy that takes pictures.
    - ``get_reward()`` (optional) is called once at the end, and its number is the reward of the rollout.
    - ``close()`` (optional, ours) is called once, when the rollout and its rewards are done, and also after an error.
    - ``score_turn()`` (optional, ours) is called after the tools of a turn, and returns the score of that turn or None.
    - ``state_key()`` (optional, ours) returns a hashable key of the present state, which `GiGPO` compares.

    Each rollout has an instance of its own, which is made for it. What is costly to make belongs to the module, and is
    made by its import: many rollouts begin side by side.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """Every class may be one: `ToolSet` says what it lacks."""
        return True if cls is Environment else NotImplemented


class EnvironmentTask(MathTask):
    r"""A problem that the policy solves in several turns, in which it calls the tools of an environment.

    A turn without a call is the answer. Only its text is graded: a tool's result never is.

    Args:
        environment: A class of the form of `Environment`, by `class_path` and `init_args`. None if `tools` are all, or
            if there are none either: then a rollout is one turn, and `rewards` in TRL's form judge it.
        calls: How the policy writes calls: `hermes`, `llama3`, `tags` (``<name>…</name>``), or `auto` by the
            tokenizer's chat template. Without a template that knows tools it is `tags`.
        limits: The limits of turns, tokens and tools.
        instruction: The text that is appended to the problem; default that of the answer's form if the row has one.
        tool_instruction: The text of the system turn that says which tags there are, where calls are plain tags.
            Default a description of the tools; '' for none, if worked examples or earlier training show it.
        system_prompt: The beginning of that turn; none by default.
        rewards: The weighted rewards. Default what `get_reward` returns if the environment has it, else 1 for a right
            answer. Functions may ask for the column `environment_reward`; those in TRL's form for `environments`.
        answer: The form of the answer: `Boxed` (default), `LastNumber`, `Marker`, `Pattern`, or a class of your own.
        compare: How answer and reference are compared; see `MathTask`.
        solved_at: The reward from which a rollout counts as right, where a row has no `answer`: that of `get_reward`,
            or without it the weighted sum of the rewards in TRL's form.
        tools: Functions that are tools beside those of the environment, by import paths such as `mypkg.multiply`; from
            Python also the functions.
        results: How a result that is no text is told: `text` (``str(result)``, as under TRL) or `json`.
    """

    has_environment = takes_conversations = True
    reads_columns = True

    def __init__(
        self,
        environment: Callable[[], Environment] | None = None,
        calls: CallFormat = "auto",
        limits: EpisodeLimits | None = None,
        instruction: str | None = None,
        tool_instruction: str | None = None,
        system_prompt: str | None = None,
        rewards: Rewards | None = None,
        answer: AnswerForm | None = None,
        compare: Comparison = "math",
        solved_at: float = 1.0,
        tools: Tools | None = None,
        results: ResultFormat = "text",
    ) -> None:
        if calls not in get_args(CallFormat):
            raise ValueError(f"`task.calls` must be one of {', '.join(get_args(CallFormat))}, but got {calls!r}.")
        if results not in get_args(ResultFormat):
            raise ValueError(f"`task.results` must be one of {', '.join(get_args(ResultFormat))}, but got {results!r}.")
        self.environment: Callable[[], Any] = environment or _Stateless
        self.calls, self.limits = calls, limits or EpisodeLimits()
        functions = [import_function(tool, {}, "`tools`", "mypkg.multiply") for tool in tools or []]
        self.environment_class = _class_of(self.environment)
        self.tools = ToolSet(self.environment_class, functions, results, may_be_empty=environment is None)
        self.has_tools = bool(self.tools.by_name)
        self.gives_reward, self.solved_at = hasattr(self.environment_class, "get_reward"), solved_at
        default_rewards = [RewardSpec(function="environment")] if self.gives_reward else None
        super().__init__(instruction, system_prompt, default_rewards if rewards is None else rewards, answer, compare)
        self._judges = self.gives_reward or self.has_trl_rewards
        if environment is None and not tools and not self.has_trl_rewards:
            raise ValueError(
                "`task.environment`, `task.tools` or `task.rewards` in TRL's form must be given, but got none of them. "
                "Name a class, or functions."
            )
        self.optional_columns = ("problem", "answer") if self._judges else ()
        self._asks_for_answer = instruction is None
        self.tool_instruction = describe(self.tools.schemas) if tool_instruction is None else tool_instruction

    def dialect(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode: Encode,
        kwargs: dict[str, Any],
        pictures: PictureEncoder | None = None,
    ) -> Dialect:
        """How calls are written with a tokenizer; see `find_dialect`."""
        named = self.tool_instruction
        limits = CallLimits(self.limits.max_calls, self.limits.call_characters)
        dialect = find_dialect(tokenizer, self.tools.schemas, self.calls, encode, kwargs, pictures, named, limits)
        if self.tools.show_pictures:
            if pictures is None:
                raise ValueError(
                    f"A tool of `{self.environment_class.__name__}` returns pictures, but the policy takes text alone. "
                    "Set another `model.policy`."
                )
            from PIL import Image

            dialect.between([[Picture(Image.new("RGB", (64, 64)))]])  # A template that does not show it is refused.
        return dialect

    def check_prompts(self, prompts: Sequence[Prompt]) -> str:
        """A remark where the sum of several rewards is compared with a `solved_at` that a solution may not reach."""
        parts = [f"`{reward.name}`" for reward in self.rewards if reward.is_trl]
        judged = not self.gives_reward and any(prompt.columns.get("answer") is None for prompt in prompts)
        if not judged or len(parts) < 2 or self.solved_at != 1:
            return ""
        return (
            f"Accuracy counts a rollout from a weighted sum of {', '.join(parts)} of 1 on (`task.solved_at`), which a "
            "solution may not reach. Set `task.solved_at` to what a rollout earns at least that solves its problem."
        )

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the data has the columns that the rewards ask for."""
        super().check_columns({*columns, REWARD, "environments"})

    def instruction_of(self, row: Mapping[str, Any]) -> str:
        """See `MathTask`. A row without an answer is not asked for the form of one."""
        return "" if self._asks_for_answer and row["answer"] == "" else self.instruction

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a row; `problem` and `answer` may be missing where the environment has a reward."""
        check_columns(self.environment_class, row)
        cells = {name: "" if value is None else value for name, value in row.items()}
        text = "prompt" if "prompt" in row and "problem" not in row else "problem"
        missing = {text: "", "answer": ""} if self._judges else {}
        if "answer" not in row and not self._judges:
            raise ValueError(
                f"A row must have the column `answer`, but got only {sorted(row)}. Name the column with `answer` of "
                f"the dataset; or write a method `get_reward` of `{self.environment_class.__name__}`, or give "
                "`rewards` in TRL's form, which read the environment: then no row needs an answer."
            )
        prompt = super().prompt(missing | cells)
        told = {"problem": prompt.columns["problem"]} if isinstance(row.get("problem"), list) else {}
        return replace(prompt, columns=dict(row) | told)

    def trl_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        columns: Mapping[str, Sequence[Any]],
        ids: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Callable[[], Values]]:
        """What was kept of each rollout: the functions are called by `rewards_outside`, when environments are there."""
        row_rewards, shares = (
            [prompt.columns.get(column) or {} for prompt in prompts] for column in (FUNCTION_REWARDS, FUNCTION_SHARES)
        )

        def values(name: str) -> RewardValues:
            result = RewardValues([row.get(name) for row in row_rewards])
            result.shares = _means([row[name] for row in shares if name in row])
            return result

        return {reward.name: partial(values, reward.name) for reward in self.rewards if reward.is_trl}

    def reward_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Values]:
        """See `AnswerTask`. A response that was given was played in no environment, whose reward is then None."""
        row_prompts = [replace(p, columns={REWARD: None, **p.columns}) if self.gives_reward else p for p in prompts]
        return super().reward_values(texts, row_prompts, verdicts, lengths, ids)

    def rewards_outside(self, rollouts: TRLRollouts) -> list[dict[str, Any]]:
        """The columns that each rollout gets of the rewards in TRL's form, which read the environments' states."""
        started = {reward.name: reward.start_trl(rollouts) for reward in self.rewards if reward.is_trl}
        values = {name: finish() for name, finish in started.items()}
        shares = {name: dict(v.shares) for name, v in values.items() if isinstance(v, RewardValues) and v.shares}
        told = {FUNCTION_SHARES: shares} if shares else {}
        return [
            {FUNCTION_REWARDS: dict(zip(values, r, strict=True))} | told for r in zip(*values.values(), strict=True)
        ]

    def verdict(self, prompt: Prompt) -> Verdict | None:
        """By the environment's reward where a row has no `answer`, `unscored` without one; None compares answers."""
        if not self._judges or prompt.columns.get("answer") is not None:
            return None
        reward = (
            prompt.columns.get(REWARD) if self.gives_reward else self._sum(prompt.columns.get(FUNCTION_REWARDS) or {})
        )
        solved = reward is not None and reward >= self.solved_at
        status = UNSCORED if reward is None else "right" if solved else "wrong"
        prediction = "" if reward is None else str(reward)
        return Verdict(correct=solved, status=status, layer="none", gold="", prediction=prediction)

    def _sum(self, values: Mapping[str, float | None]) -> float | None:
        """The weighted sum of the values of the rewards in TRL's form; None if they score nothing."""
        outside = [reward for reward in self.rewards if reward.is_trl]
        return weighted_sums(outside, {reward.name: [values.get(reward.name)] for reward in outside})[0]


def _means(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each share over the rollouts, which may be those of several calls."""
    return {what: math.fsum(row[what] for row in shares) / len(shares) for what in (shares[0] if shares else ())}


class _Stateless:
    """The environment of tools that are functions: it has no state."""

    def reset(self, **row: object) -> None:
        """Begin a rollout; the problem is in the prompt."""


def _class_of(environment: Callable[[], Any]) -> type:
    """The class of what a factory makes, of which one is made to see."""
    with trial_environment(environment) as instance:
        return type(instance)
