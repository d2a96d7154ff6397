"""A task whose question and reference are made from the row, with a known form of answers and a list of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grail_lightning.answers import Pattern
from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Prompt
from grail_lightning.tasks.rewards import RewardSpec


class Parity(AnswerTask):
    """Whether a sum is even: yes or no.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.
    """

    def __init__(self, rewards: list[RewardSpec] | None = None) -> None:
        super().__init__(rewards, answer=Pattern(r"(?i)\b(yes|no)\b"), compare="text")

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The question as plain text, without a chat template."""
        even = sum(map(int, str(row["problem"]).split("+"))) % 2 == 0
        question = f"Is {row['problem']} even? Say yes or no.\n"
        return Prompt(messages=question, reference="yes" if even else "no", task=self, columns=dict(row))
