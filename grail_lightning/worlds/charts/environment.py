"""The world of charts: a policy answers a question about a bar or line chart, and draws on its picture to find out.

Both axes have ten units, from the left and from the bottom. The elements, bars or points, stand at x = 1, 3, 5, …
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from PIL import ImageDraw
from PIL.Image import Image, new

Form = Literal["bars", "line"]
Asks = Literal["largest", "difference", "count", "trend"]
Tool = Literal["line", "box", "point"]

UNITS, PIXELS = 10, 8  # The units of an axis, and the pixels of a unit.
MAX_DRAWINGS = 16
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 200, 20),
    "purple": (160, 50, 190),
}
"""The elements' colours from left to right, as plotting libraries take them in turn."""
_NEAR = 0.5  # How far a coordinate may be from where it should be, in units.
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)")
_HOW = f"each from 0 to {UNITS}, x from the left and y from the bottom."


class Drawing(NamedTuple):
    """A mark on a chart, with its coordinates in units: x and y of one corner, and of the opposite one."""

    tool: Tool
    places: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """A chart with a value of 1 to 9 for each colour."""

    form: Form
    colours: tuple[str, ...]
    values: tuple[int, ...]

    def element(self, number: int) -> Drawing:
        """How an element is marked: a box around the bar, or the point of the line."""
        x, y = 2 * number + 1, self.values[number]
        return Drawing("box", (x - 1, 0, x + 1, y)) if self.form == "bars" else Drawing("point", (x, y))

    def level(self, y: float) -> Drawing:
        """The horizontal line through all of the chart."""
        return Drawing("line", (0, y, UNITS, y))

    def slope(self, first: int, last: int) -> Drawing:
        """The line from the top of one element to that of another."""
        return Drawing("line", (2 * first + 1, self.values[first], 2 * last + 1, self.values[last]))

    def steps(self, asks: Asks, about: Sequence[str], mistaken: bool = False) -> list[Drawing]:
        """The drawings that answer a question.

        Args:
            asks: The kind of question.
            about: The two colours of a difference, or the level of a count.
            mistaken: Whether they follow the misconception of the kind: the first peak is the largest, what is at a
                level is above it, a difference is that to the neighbour, and a trend that of the last two.
        """
        values, last = self.values, len(self.values) - 1
        if asks == "trend":
            return [self.slope(last - 1 if mistaken else 0, last)]
        if asks == "difference":
            first, second = (self.colours.index(colour) for colour in about)
            neighbour = first + 1 if first < last else first - 1
            return [self.element(first), self.element(neighbour if mistaken else second)]
        if asks == "largest":
            peak = values.index(max(values))
            if mistaken:
                peak = next((k for k in range(last) if values[k] > values[k + 1]), last)
            return [self.level(values[peak]), self.element(peak)]
        level = int(about[0])
        above = [k for k, value in enumerate(values) if value > level or (mistaken and value == level)]
        return [self.level(level), *map(self.element, above)]

    def picture(self, drawings: Sequence[Drawing] = ()) -> Image:
        """The chart as people see it, with drawings on it in black."""
        size = UNITS * PIXELS
        image = new("RGB", (size, size), "white")
        pen = ImageDraw.Draw(image)
        for y in range(2, UNITS, 2):
            pen.line([0, size - y * PIXELS, size, size - y * PIXELS], (225, 225, 225))
        tops = [((2 * k + 1) * PIXELS, size - value * PIXELS) for k, value in enumerate(self.values)]
        if self.form == "line":
            pen.line(tops, (150, 150, 150))
        for (x, y), colour in zip(tops, self.colours, strict=True):
            shape = [x - 6, y, x + 5, size] if self.form == "bars" else [x - 4, y - 4, x + 3, y + 3]
            pen.rectangle(shape, COLOURS[colour])
        for tool, places in drawings:
            ends = [(PIXELS * x, size - PIXELS * y) for x, y in zip(places[::2], places[1::2], strict=True)]
            xs, ys = zip(*ends, strict=True)
            if tool == "line":
                pen.line(ends, "black", 2)
            elif tool == "box":
                pen.rectangle([min(xs), min(ys), max(xs), max(ys)], outline="black", width=2)
            else:
                pen.ellipse([xs[0] - 6, ys[0] - 6, xs[0] + 6, ys[0] + 6], outline="black", width=2)
        return image


def near(drawing: Drawing, goal: Drawing) -> bool:
    """Whether a drawing is where another one should be, whichever of its ends or corners comes first."""
    if drawing.tool != goal.tool:
        return False
    return all(abs(a - b) <= _NEAR for a, b in zip(_sorted(drawing), _sorted(goal), strict=True))


def _sorted(drawing: Drawing) -> list[float]:
    places = drawing.places
    ends = list(zip(places[::2], places[1::2], strict=True))
    if drawing.tool == "box":
        xs, ys = zip(*ends, strict=True)
        ends = [(min(xs), min(ys)), (max(xs), max(ys))]
    return [value for end in sorted(ends) for value in end]


class Charts:
    """Drawing on the picture of a chart, as an environment in the form of TRL. Its tools are `line`, `box` and `point`.

    The answer is not given here: it is the text of the last turn, which the task grades.
    """

    def reset(
        self, form: Form, colours: Sequence[str], values: Sequence[int], asks: Asks, about: Sequence[str], **row: object
    ) -> None:
        """Begin a rollout on the chart of a row of `ChartSpace`; the other columns are not read."""
        self._chart = Chart(form, tuple(colours), tuple(values))
        self._open = self._chart.steps(asks, about)  # What is still to be marked.
        self._key: Hashable = (self._chart, asks, tuple(about))
        self._drawn: tuple[Drawing, ...] = ()
        self._score: float | None = None

    def line(self, ends: str) -> Image | str:
        """Draw a straight line.

        Args:
            ends: The numbers x1, y1, x2 and y2 of its ends, from 0 to 10, from the left and from the bottom.

        Returns:
            The picture with all drawings.
        """
        return self._draw("line", ends)

    def box(self, corners: str) -> Image | str:
        """Draw a box.

        Args:
            corners: The numbers x1, y1, x2 and y2 of two opposite corners, from 0 to 10.

        Returns:
            The picture with all drawings.
        """
        return self._draw("box", corners)

    def point(self, place: str) -> Image | str:
        """Draw a ring around a point.

        Args:
            place: Its numbers x and y, from 0 to 10.

        Returns:
            The picture with all drawings.
        """
        return self._draw("point", place)

    def _draw(self, tool: Tool, text: str) -> Image | str:
        self._score = 0.0
        needed = 2 if tool == "point" else 4
        places = tuple(float(number) for number in _NUMBER.findall(text))
        if len(places) != needed or not all(0 <= place <= UNITS for place in places):
            return f"Not drawn: it needs {needed} numbers, {_HOW}"
        if len(self._drawn) >= MAX_DRAWINGS:
            return f"Not drawn: {MAX_DRAWINGS} drawings are there, and no more fit."
        drawing = Drawing(tool, places)
        self._drawn += (drawing,)
        match = next((goal for goal in self._open if near(drawing, goal)), None)
        if match is not None:
            self._open = [goal for goal in self._open if goal != match]
            self._score = 1.0
        return self._chart.picture(self._drawn)

    def score_turn(self) -> float | None:
        """1 if the turn's last drawing marks what the question needs and was not marked before, else 0."""
        sys.audit("grail_lightning.scores", type(self).__name__)
        score, self._score = self._score, None
        return score

    def state_key(self) -> Hashable:
        """The question, and the set of drawings so far."""
        return self._key, frozenset(self._drawn)
