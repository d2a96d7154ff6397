r"""The arithmetic task: chains of which every line can be checked, so that the wrong step of a rollout is known.

The labels that `ArithmeticTask.label_steps` gives to the response to ``Compute 7+5-3+8.``::

    Then          filler          no digit and no equals sign
    7+5=2         misconception   exactly the forgotten carry (`grail_lightning.tasks.problems.misconception`)
    2-3=-1        inherited       right in itself, but computed from a wrong result
    -1+8=6        slip            any other wrong result
    \boxed{6}     (no step)       copies the last result
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Prompt, Step
from grail_lightning.tasks.chains import Chain
from grail_lightning.tasks.problems import Problem
from grail_lightning.tasks.rewards import Rewards


class ArithmeticTask(AnswerTask):
    r"""The task of computing ``7+5-3+8`` line by line and boxing the result.

    The response to the prompt ``Compute 7+5-3+8.`` is a chain of lines ``7+5=12``, ``12-3=9``, … and ``\boxed{17}``.

    Args:
        rewards: The weighted rewards of a response; default 1 for a right answer, else 0.

    Raises:
        ValueError: If a reward cannot be found, or two have one name.
    """

    def __init__(self, rewards: Rewards | None = None) -> None:
        super().__init__(rewards)

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The row's ``problem`` (an expression such as ``7+5-3+8``) as a prompt.

        Raises:
            ValueError: If the column is missing or holds no such expression.
        """
        if "problem" not in row:
            raise ValueError(f"An arithmetic row must have the column `problem`, but got {sorted(row)}.")
        problem = _parse(str(row["problem"]))
        return Prompt(
            messages=f"Compute {problem.expression}.",
            reference=str(problem.answer),
            task=self,
            columns=dict(row),
            dataset="arithmetic",
        )

    def label_steps(self, text: str, prompt: Prompt) -> list[Step]:
        r"""Label every step of any response, well-formed or not, in time linear in its length.

        A line ``a+b=c`` is compared with the expected line: the running total, the problem's next term, and their
        result.

        - sound: The line is the expected one, or returns to the right total after a wrong one.
        - inherited: The line is right in itself, but ``a`` is an earlier wrong result. After two errors that cancel,
          lines are sound again.
        - misconception: ``c`` is the value of ``a+b`` with a forgotten carry.
        - slip: ``c`` is wrong in another way; or ``a`` or the term is not the expected one (miscopied, skipped,
          repeated, one line too many); or the line has digits or an equals sign but is no equation. After a skipped
          or repeated term the chain continues with the term after it.
        - filler: The line has neither a digit nor an equals sign.

        A box is no step if it holds the right answer, or the value that the rest of the problem gives from the last
        line (after a complete chain, the last result). Any other box is a slip. Empty lines are no steps.

        `Step.result` is the range of characters in which an error is, or would be, visible: that of ``c``; that of
        ``a`` or of the term (with its operator) if this part is miscopied; that of a box's content. It is None for
        filler and for lines that are no equation.
        """
        return Chain(_parse(str(prompt.columns["problem"]))).label(text, self.answer_spans(text))


_parse = lru_cache(maxsize=4096)(Problem.parse)
