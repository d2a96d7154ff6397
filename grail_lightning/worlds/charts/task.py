r"""Questions about generated charts, and demonstrations of how they are answered by drawing, with mistakes.

A demonstration for ``How far apart are red and blue?`` on a chart of bars, in which each result is the picture with
what was drawn::

    <box>0 0 2 7</box>
    <result>…</result>
    <box>4 0 6 3</box>
    <result>…</result>
    Answer: 4
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image

from grail_lightning.answers.find import Marker
from grail_lightning.core.records.task import StepKind
from grail_lightning.worlds.charts.environment import COLOURS, Asks, Chart, Charts, Drawing, Form, near
from grail_lightning.worlds.splits import ProblemSplit, distinct, split_rng

CHART_ANSWER = Marker("Answer:")
_QUESTIONS: dict[Asks, str] = {
    "largest": "Which is largest?",
    "difference": "How far apart are {} and {}?",
    "count": "How many are above {}?",
    "trend": "Does it rise or fall from first to last?",
}


@dataclass(frozen=True)
class ChartProblem:
    """A question about a chart."""

    chart: Chart
    asks: Asks
    about: tuple[str, ...]  # The two colours of a difference, or the level of a count.

    @property
    def text(self) -> str:
        """The question, such as `How many are above 4?`."""
        return _QUESTIONS[self.asks].format(*self.about)

    @property
    def steps(self) -> list[Drawing]:
        """The drawings of the worked solution."""
        return self.chart.steps(self.asks, self.about)

    @property
    def answer(self) -> str:
        """The right answer."""
        return _concluded(self, self.steps)

    def row(self) -> dict[str, Any]:
        """The columns of the question; see `ChartSpace.sample`."""
        encoded = io.BytesIO()
        self.chart.picture().save(encoded, "PNG")
        return {
            "problem": self.text,
            "answer": self.answer,
            "image": encoded.getvalue(),
            **{name: getattr(self.chart, name) for name in ("form", "colours", "values")},
            "asks": self.asks,
            "about": self.about,
            "steps": len(self.steps),
        }


@dataclass(frozen=True)
class ChartSpace:
    """The set of all questions about charts, from which seeded draws are made.

    Every question about a chart belongs permanently to one split, by a hash: 80 % train, 10 % validation, 10 % test.

    Attributes:
        min_elements: The smallest number of bars or points.
        max_elements: The largest number of bars or points.
        asks: The kinds of questions: largest, difference, count, trend.
    """

    min_elements: int = 4
    max_elements: int = 5
    asks: Sequence[Asks] = ("largest", "difference", "count", "trend")

    def __post_init__(self) -> None:
        questions = set(self.asks)
        if not 3 <= self.min_elements <= self.max_elements <= 5 or not questions or questions - set(_QUESTIONS):
            raise ValueError(
                "`problems` must have 3 <= min_elements <= max_elements <= 5 and `asks` from "
                f"{', '.join(_QUESTIONS)}, but got {self.min_elements}, {self.max_elements} and {list(self.asks)}."
            )

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[dict[str, Any]]:
        """Different questions of one split, always the same for the same arguments, as rows.

        Their columns are `problem`, `answer`, `image` (PNG), the chart as `form`, `colours` and `values`, the question
        as `asks` and `about`, and `steps`, the number of drawings of the worked solution. `Charts.reset` takes the
        rows as they are.
        """
        return [problem.row() for problem in self.draw(num_problems, split, seed)]

    def draw(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> list[ChartProblem]:
        """The questions of `sample`."""
        rng = split_rng(split, seed, "charts-")
        return distinct(lambda: self._draw(rng), repr, num_problems, split, "`max_elements`")

    def _draw(self, rng: random.Random) -> ChartProblem:
        while True:
            number = rng.randint(self.min_elements, self.max_elements)
            form: Form = "bars" if rng.random() < 0.5 else "line"
            values = tuple(rng.randint(1, 9) for _ in range(number))
            chart = Chart(form, tuple(COLOURS)[:number], values)
            asks = rng.choice(self.asks)
            about: tuple[str, ...] = ()
            if asks == "difference":
                about = tuple(rng.sample(chart.colours, 2))
            elif asks == "count":
                # In half of the questions an element is at the level.
                about = (str(rng.choice(values) if rng.random() < 0.5 else rng.randint(2, 8)),)
            if _clear(chart, asks, about):
                return ChartProblem(chart, asks, about)


def _clear(chart: Chart, asks: Asks, about: tuple[str, ...]) -> bool:
    """Whether a question has one answer, and few drawings."""
    values = chart.values
    if asks == "trend":
        return values[0] != values[-1]
    if asks == "largest":
        return values.count(max(values)) == 1
    if asks == "count":
        return 1 <= sum(value > int(about[0]) for value in values) <= 3
    return len({values[chart.colours.index(colour)] for colour in about}) == 2


def _concluded(problem: ChartProblem, drawings: Sequence[Drawing]) -> str:
    """The answer that follows from the drawings of a solution."""
    heights = [drawing.places[-1] for drawing in drawings]
    if problem.asks == "trend":
        return "rise" if heights[0] > drawings[0].places[1] else "fall"
    if problem.asks == "difference":
        return f"{abs(heights[0] - heights[1]):g}"
    if problem.asks == "count":
        return str(len(drawings) - 1)
    x = drawings[1].places
    return problem.chart.colours[int(sum(x[::2]) / len(x[::2])) // 2]


def chart_demonstration(
    problem: ChartProblem, rng: random.Random, *, slip: float = 0.0, misconception: float = 0.0
) -> list[tuple[str, Image | None]]:
    """The turns of a rollout with random mistakes, which goes on from what it drew.

    Each turn is what a policy writes, and the picture that the environment answers with; None behind the last turn.
    `slip` is the probability that a drawing is at the wrong height or at another element, or that the answer does not
    follow from the drawings; `misconception` is the one that the solution follows the misconception of its kind of
    question (`Chart.steps`).
    """
    variant = problem
    if problem.asks == "count" and rng.random() < slip:  # It counts from a wrong level.
        variant = replace(problem, about=(str(int(problem.about[0]) + rng.choice((-1, 1))),))
    drawings = variant.chart.steps(variant.asks, variant.about, mistaken=rng.random() < misconception)
    drawings = [_slipped(variant.chart, step, rng) if rng.random() < slip else step for step in drawings]
    environment, turns = Charts(), []
    environment.reset(**problem.row())
    for tool, places in drawings:
        text = " ".join(map(str, places))
        turns.append((f"<{tool}>{text}</{tool}>", getattr(environment, tool)(text)))
    answer = _concluded(problem, drawings)
    if rng.random() < slip:
        answer = _another(answer, problem.chart, rng)
    return [*turns, (f"{CHART_ANSWER.marker} {answer}", None)]


def _slipped(chart: Chart, drawing: Drawing, rng: random.Random) -> Drawing:
    """The drawing at a height that is off by one; or, of an element, in half of the cases at a neighbour."""
    tool, places = drawing
    if tool != "line" and rng.random() < 0.5:
        number = int(sum(places[::2]) / len(places[::2])) // 2
        return chart.element(rng.choice([k for k in (number - 1, number + 1) if 0 <= k < len(chart.values)]))
    off = rng.choice((-1, 1)) if places[-1] > 1 else 1
    level = tool == "line" and places[1] == places[3]
    *before, y = places
    return Drawing(tool, (before[0], before[1] + off, before[2], y + off) if level else (*before, y + off))


def _another(answer: str, chart: Chart, rng: random.Random) -> str:
    """A wrong answer of the same kind; a number is off by one."""
    if answer.isdigit():
        return str(abs(int(answer) + rng.choice((-1, 1))))
    others = chart.colours if answer in chart.colours else ("rise", "fall")
    return rng.choice([other for other in others if other != answer])


def label_drawing(problem: ChartProblem, drawing: Drawing) -> StepKind:
    """Whether a drawing is one of the worked solution, one of its misconception, or a slip."""
    sys.audit("grail_lightning.labels", "label_drawing")
    if any(near(drawing, goal) for goal in problem.steps):
        return "sound"
    tempting = problem.chart.steps(problem.asks, problem.about, mistaken=True)
    return "misconception" if any(near(drawing, goal) for goal in tempting) else "slip"
