"""The task whose rollouts have several turns, in which the policy calls the tools of an environment."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from grail_lightning.answers import AnswerForm
from grail_lightning.answers.records import Verdict
from grail_lightning.environments.dialogue import CallFormat, Dialect, Encode, describe, find_dialect
from grail_lightning.environments.episode import EpisodeLimits
from grail_lightning.environments.tools import ToolSet, check_columns, new_environment
from grail_lightning.picture import Picture, PictureEncoder
from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.base import REWARD, Comparison, Prompt
from grail_lightning.tasks.rewards import Rewards, RewardSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Environment(ABC):  # noqa: B024  (a class is one by what it has)
    """What a class needs to be an environment, as TRL's `environment_factory` takes it; it inherits nothing.

    - ``reset(**row)`` begins a rollout with the columns of the dataset's row. A text that it returns is appended to
      the last message of the prompt. If its signature names ``seed``, it is given 63 bits for its random numbers, keyed
      by the run's seed, the step and the prompt: all rollouts of a group are given the same, so that they play the same
      problem. If it names ``images``, it is given the pictures of the prompt as Pillow's images.
    - Every other public method is a tool. It has type hints and a docstring in Google's style, from which the policy is
      told what it does. What it returns is the text that the policy is told; an exception becomes a text, too. An image
      of Pillow, or a list of texts and images, is shown to a policy that takes pictures.
    - ``get_reward()`` (optional) is called once at the end, and its number is the reward of the rollout.
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
        environment: A class of the form of `Environment`, by `class_path` and `init_args`.
        calls: How the policy writes calls: `hermes`, `llama3`, `tags` (``<name>…</name>``), or `auto` by the
            tokenizer's chat template. Without a template that knows tools it is `tags`.
        limits: The limits of turns, tokens and tools.
        instruction: The text that is appended to the problem; default that of the answer's form if the row has one.
        tool_instruction: The text of the system turn that says which tags there are, where calls are plain tags.
            Default a description of the tools; '' for none, if worked examples or earlier training show it.
        system_prompt: The beginning of that turn; none by default.
        rewards: The weighted rewards. Default what `get_reward` returns if the environment has it, else 1 for a right
            answer. Functions may ask for the column `environment_reward`.
        answer: The form of the answer: `Boxed` (default), `LastNumber`, `Marker`, `Pattern`, or a class of your own.
        compare: How answer and reference are compared; see `MathTask`.
        solved_at: The environment's reward from which a rollout counts as right, where a row has no `answer`.
    """

    has_environment = True
    reads_columns = True

    def __init__(
        self,
        environment: Callable[[], Environment],
        calls: CallFormat = "auto",
        limits: EpisodeLimits | None = None,
        instruction: str | None = None,
        tool_instruction: str | None = None,
        system_prompt: str | None = None,
        rewards: Rewards | None = None,
        answer: AnswerForm | None = None,
        compare: Comparison = "math",
        solved_at: float = 1.0,
    ) -> None:
        if calls not in get_args(CallFormat):
            raise ValueError(f"`task.calls` must be one of {', '.join(get_args(CallFormat))}, but got {calls!r}.")
        self.environment, self.calls, self.limits = environment, calls, limits or EpisodeLimits()
        self.environment_class = type(new_environment(environment))
        self.tools = ToolSet(self.environment_class)
        self.gives_reward, self.solved_at = hasattr(self.environment_class, "get_reward"), solved_at
        self.optional_columns = ("problem", "answer") if self.gives_reward else ()
        own = [RewardSpec(function="environment")] if self.gives_reward else None
        super().__init__(instruction, system_prompt, rewards or own, answer, compare)
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
        made = find_dialect(tokenizer, self.tools.schemas, self.calls, encode, kwargs, pictures, named)
        if self.tools.show_pictures:
            if pictures is None:
                raise ValueError(
                    f"A tool of `{self.environment_class.__name__}` returns pictures, but the policy takes text alone. "
                    "Set another `model.policy`."
                )
            from PIL import Image

            made.between([[Picture(Image.new("RGB", (64, 64)))]])  # A template that does not show it is refused.
        return made

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the data has the columns that the rewards ask for."""
        super().check_columns({*columns, REWARD})

    def instruction_of(self, row: Mapping[str, Any]) -> str:
        """See `MathTask`. A row without an answer is not asked for the form of one."""
        return "" if self._asks_for_answer and row["answer"] == "" else self.instruction

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a row; `problem` and `answer` may be missing where the environment has a reward."""
        check_columns(self.environment_class, row)
        known = {name: "" if value is None else value for name, value in row.items()}
        missing = {"problem": "", "answer": ""} if self.gives_reward else {}
        return replace(super().prompt(missing | known), columns=dict(row))

    def verdict(self, prompt: Prompt) -> Verdict | None:
        """By the environment's reward where a row has no `answer`; None compares answers."""
        if not self.gives_reward or prompt.columns.get("answer") is not None:
            return None
        reward = prompt.columns.get(REWARD)
        solved = reward is not None and reward >= self.solved_at
        status = "right" if solved else "wrong"
        return Verdict(correct=solved, status=status, layer="none", gold="", prediction=str(reward))
