"""A task that labels the steps of a response: each line `a+b=c` or `a-b=c` is right, or wrong."""

from __future__ import annotations

import re

from grail_lightning import MathTask, Prompt, Step

EQUATION = re.compile(r"(-?\d+)([+-])(\d+)=(-?\d+)")


class CheckedSums(MathTask):
    """Sums, of whose responses every equation is checked. The text between equations is no step."""

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """One step for each equation; `result` is where an error is visible."""
        steps = []
        for found in EQUATION.finditer(text):
            a, b, stated = int(found[1]), int(found[3]), int(found[4])
            right = (a + b if found[2] == "+" else a - b) == stated
            kind = "sound" if right else "slip"
            steps.append(Step(start=found.start(), stop=found.end(), kind=kind, result=found.span(4)))
        return steps
