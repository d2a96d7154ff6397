"""A task whose question and reference are made from the row, with a known form of answers and a list of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grail_lightning import AnswerTask, Prompt, RewardSpec
from grail_lightning.answers import LastNumber


class SumOfTerms(AnswerTask):
    """The sum of the numbers in the column `terms`.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.
    """

    def __init__(self, rewards: list[RewardSpec] | None = None) -> None:
        super().__init__(rewards, answer=LastNumber())

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The question as plain text, without a chat template."""
        expression = "".join(f"{term:+d}" for term in row["terms"]).removeprefix("+")
        reference = str(sum(row["terms"]))
        return Prompt(messages=f"Compute {expression}.", reference=reference, task=self, columns=dict(row))
