r"""The task of text problems with a boxed answer, with the prompt of the published runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grail_lightning.tasks.base import Messages, Prompt
from grail_lightning.tasks.boxed import BoxedTask
from grail_lightning.tasks.rewards import RewardSpec

_INSTRUCTION = r" Please reason step by step, and put your final answer within \boxed{}."


class MathTask(BoxedTask):
    r"""A problem and an instruction as one user turn; the answer is the content of the last complete `\boxed{...}`.

    Args:
        instruction: The text that is appended to the problem, including its leading space.
        system_prompt: The text of a system turn before the user turn; none by default.
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.

    Raises:
        ValueError: If a text holds a backspace, which is what `"\boxed"` means inside double quotes; if a reward cannot
            be found, or two have one name.
    """

    def __init__(
        self,
        instruction: str = _INSTRUCTION,
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
        super().__init__(rewards)

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of the columns `problem` and `answer` of a row; it keeps all columns.

        Raises:
            ValueError: If one of the two columns is missing.
        """
        missing = [name for name in ("problem", "answer") if name not in row]
        if missing:
            raise ValueError(f"A row must have the columns `problem` and `answer`, but got only {sorted(row)}.")
        messages: Messages = [{"role": "user", "content": f"{row['problem']}{self.instruction}"}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return Prompt(messages=messages, reference=str(row["answer"]).strip(), task=self, columns=dict(row))
