"""The task of text problems. Its default prompt is that of the published runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grail_lightning.answers import AnswerForm, Pattern
from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Comparison, Messages, Prompt
from grail_lightning.tasks.rewards import Rewards


class MathTask(AnswerTask):
    r"""A problem and an instruction as one user turn, and the form in which the answer is expected.

    Args:
        instruction: The text that is appended to the problem, including its leading space; default that of the answer's
            form, for a box the sentence of the published runs.
        system_prompt: The text of a system turn before the user turn; none by default.
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.
        answer: The form of the answer: `Boxed` (default), `LastNumber`, `Marker`, `Pattern`, or a class of your own.
        compare: How answer and reference are compared: math by the verifier; text as text, without regard to case and
            to the amount of white space; exact as text, with regard to case.
    """

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

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of the columns `problem` and `answer` of a row; it keeps all columns."""
        missing = [name for name in ("problem", "answer") if name not in row]
        if missing:
            raise ValueError(f"A row must have the columns `problem` and `answer`, but got only {sorted(row)}.")
        messages: Messages = [{"role": "user", "content": f"{row['problem']}{self.instruction}"}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        reference = self.form.bare(str(row["answer"])).strip()
        return Prompt(messages=messages, reference=reference, task=self, columns=dict(row))
