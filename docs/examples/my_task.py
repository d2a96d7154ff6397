"""A task whose answer is a list of words: sort them, and write them on one line after `Sorted:`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grail_lightning.answers import AnswerSpan, Marker
from grail_lightning.tasks.base import GradedAnswer, Prompt, Task


class SortWords(Task):
    """Words in alphabetical order. A word in its right place earns a part of the reward.

    Args:
        separator: The text between two words.
    """

    compare = "text"  # The answer is text: no formula is parsed, and upper and lower case are the same.

    def __init__(self, separator: str = " ") -> None:
        self.separator = separator
        self.form = Marker("Sorted:")

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The question as one user turn, with the reference answer and this task as its grader."""
        question = f"Sort these words: {row['problem']}. Write them on one line after 'Sorted:'."
        return Prompt(
            messages=[{"role": "user", "content": question}],
            reference=str(row["answer"]),
            task=self,
            columns=dict(row),
        )

    def answer(self, text: str) -> str | None:
        """What stands after the last `Sorted:`; None if there is none."""
        return self.form.last(text)

    def answer_spans(self, text: str) -> list[AnswerSpan]:
        """Where the answers stand, for credit methods that explain or overwrite the answer's tokens."""
        return self.form.find(text)

    def reward(self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[GradedAnswer]) -> list[float]:
        """1 for a right answer, else half the share of the words that stand in their place."""
        return [
            1.0 if verdict.correct else 0.5 * self._in_place(self.answer(text), prompt.reference)
            for text, prompt, verdict in zip(texts, prompts, verdicts, strict=True)
        ]

    def _in_place(self, answer: str | None, reference: str) -> float:
        wanted = reference.split(self.separator)
        given = (answer or "").split(self.separator)
        return sum(a == b for a, b in zip(given, wanted, strict=False)) / len(wanted)
