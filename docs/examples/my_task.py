"""A task that pays for right steps, too: a sum is computed line by line, and each line states a running total."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from grail_lightning import GradedAnswer, Prompt, Task
from grail_lightning.answers import AnswerSpan, Boxed


class RunningTotals(Task):
    """A sum with the answer in a box. A line with the right running total earns a part of the reward.

    Args:
        share: The reward of a wrong answer after lines that are all right.
    """

    compare = "text"  # The answer is a whole number: equal text is enough, and no formula is parsed.

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self.form = Boxed()

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The question as one user turn, with the reference answer and this task as its grader."""
        return Prompt(
            messages=[{"role": "user", "content": row["problem"]}],
            reference=str(row["answer"]),
            task=self,
            columns=dict(row),
        )

    def answer(self, text: str) -> str | None:
        """What stands in the last box; None if there is none."""
        return self.form.last(text)

    def answer_spans(self, text: str) -> list[AnswerSpan]:
        """Where the answers stand, for credit methods that explain or overwrite the answer's tokens."""
        return self.form.find(text)

    def reward(self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[GradedAnswer]) -> list[float]:
        """1 for a right answer, else `share` times the part of the lines that have the right running total."""
        return [
            1.0 if verdict.correct else self.share * self._right_lines(text, prompt)
            for text, prompt, verdict in zip(texts, prompts, verdicts, strict=True)
        ]

    def _right_lines(self, text: str, prompt: Prompt) -> float:
        wanted = [str(total) for total in accumulate(prompt.columns["terms"])][1:]
        given = re.findall(r"=(-?[0-9]+)", text)
        return sum(a == b for a, b in zip(given, wanted, strict=False)) / len(wanted)
