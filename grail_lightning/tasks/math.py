r"""Problems in words with a boxed answer: the prompt of the published runs; 1 or 0 for it, or rewards of yours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grail_lightning.answers import find_boxes
from grail_lightning.rollout import Earned, GradedAnswer, Messages, Prompt, Task
from grail_lightning.tasks.rewards import Reward, RewardSpec, Values, total_reward

INSTRUCTION = r" Please reason step by step, and put your final answer within \boxed{}."


class MathTask(Task):
    r"""A problem and an instruction as one user turn; the answer is what stands in the last complete `\boxed{...}`.

    Args:
        instruction: Follows the problem, as it stands (with its leading space).
        system_prompt: A system turn in front of it; none by default.
        rewards: What a response earns, several with weights; default 1 for a right answer, else 0.

    Raises:
        ValueError: If a text holds a backspace, which is what `"\boxed"` means inside double quotes; if a reward cannot
            be found, or two have one name.
    """

    def __init__(
        self,
        instruction: str = INSTRUCTION,
        system_prompt: str | None = None,
        rewards: list[RewardSpec] | None = None,
    ) -> None:
        for name, text in (("instruction", instruction), ("system_prompt", system_prompt)):
            if text is not None and "\b" in text:
                raise ValueError(
                    rf"`{name}` must not hold a backspace character, but got {text!r}. Inside double quotes `\b` is "
                    r"one: write `\\boxed`, or use single quotes."
                )
        self.instruction, self.system_prompt = instruction, system_prompt
        self.rewards = [Reward(spec) for spec in rewards or [RewardSpec(function="correctness")]]
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"`rewards` must have different names, but got {names}. Give one of them a `name`.")

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The columns `problem` and `answer` of a row as a prompt; all its columns travel along.

        Raises:
            ValueError: If one of the two is not there.
        """
        missing = [name for name in ("problem", "answer") if name not in row]
        if missing:
            raise ValueError(f"A row must have the columns `problem` and `answer`, but got only {sorted(row)}.")
        messages: Messages = [{"role": "user", "content": f"{row['problem']}{self.instruction}"}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return Prompt(messages=messages, reference=str(row["answer"]).strip(), task=self, columns=dict(row))

    def answer(self, text: str) -> str | None:
        """What stands in the last complete box, without outer white space."""
        boxes = find_boxes(text)
        return text[boxes[-1].content_start : boxes[-1].content_stop].strip() if boxes else None

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
        """The weighted sums, and the rewards that they are made of."""
        values = self.reward_values(texts, prompts, verdicts, lengths)
        return Earned(total=total_reward(self.rewards, values), values=values)

    def reward_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
    ) -> dict[str, Values]:
        """What each reward gives each response, by the reward's name and before weighting.

        Args:
            texts: The responses.
            prompts: One a response.
            verdicts: One a response.
            lengths: Their generated tokens; None where nobody counted, which only some rewards mind.

        Raises:
            ValueError: If a reward raises, or does not return one finite number or None a response.
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
