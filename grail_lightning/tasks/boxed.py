r"""The base class of tasks with a boxed answer: the last complete `\boxed{...}` is graded, functions give rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grail_lightning.answers import box_content
from grail_lightning.tasks.base import Earned, GradedAnswer, Prompt, Task
from grail_lightning.tasks.rewards import Reward, RewardSpec, Values, total_reward


class BoxedTask(Task):
    """The base class of tasks with a boxed answer. A subclass implements `prompt`.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.

    Raises:
        ValueError: If a reward cannot be found, or two have one name.
    """

    def __init__(self, rewards: list[RewardSpec] | None = None) -> None:
        self.rewards = [Reward(spec) for spec in rewards or [RewardSpec(function="correctness")]]
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"`rewards` must have different names, but got {names}. Give one of them a `name`.")

    def check_length(self, max_response_length: int) -> None:
        """Check that the rewards are useful for responses of at most this length.

        Raises:
            ValueError: If an overlong penalty would be 0 for all responses.
        """
        for reward in self.rewards:
            free = reward.arguments["limit"] - reward.arguments["buffer"] if reward.path == "overlong" else 0
            if free >= max_response_length:
                raise ValueError(
                    f"The reward `{reward.name}` must begin below the longest response, `sampling.max_response_length` "
                    f"{max_response_length}, but got limit - buffer = {free}. Set `limit` to {max_response_length}."
                )

    def answer(self, text: str) -> str | None:
        """The content of the last complete box, without outer white space."""
        return box_content(text)

    def reward(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
    ) -> list[float]:
        """The weighted sum of the rewards of each response; see `reward_values`."""
        return total_reward(self.rewards, self.reward_values(texts, prompts, verdicts, lengths))

    def earn(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int],
    ) -> Earned:
        """The weighted sums and their parts, or the values of a subclass's own `reward`."""
        if type(self).reward is not BoxedTask.reward:
            return super().earn(texts, prompts, verdicts, lengths)
        values = self.reward_values(texts, prompts, verdicts, lengths)
        return Earned(total=total_reward(self.rewards, values), values=values)

    def reward_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
    ) -> dict[str, Values]:
        """The values of each reward for all responses, by the reward's name and before weighting.

        Args:
            texts: The responses.
            prompts: One prompt for each response.
            verdicts: One verdict for each response.
            lengths: The number of generated tokens of each; None if unknown; a reward that needs it then raises.

        Raises:
            ValueError: If a reward raises, or does not return one finite number or None for each response.
        """
        ours = {"responses", "references", "lengths"}
        names = [name for name in dict.fromkeys(n for prompt in prompts for n in prompt.columns) if name not in ours]
        columns: dict[str, Sequence[Any]] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        columns |= {
            "correct": [verdict.correct for verdict in verdicts],
            "status": [verdict.status for verdict in verdicts],
            "answers": [self.answer(text) for text in texts],
        }
        if lengths is not None:
            columns["lengths"] = lengths
        references = [prompt.reference for prompt in prompts]
        return {reward.name: reward(texts, references, columns) for reward in self.rewards}
