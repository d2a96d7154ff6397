"""A picture of rollouts whose tokens carry their weights as background colour.

The scale has its middle, white, at weight 1: a token that gets the rollout's advantage unchanged, as every token does
under GRPO. Orange tokens get more, purple ones less. The two hues differ for all common kinds of colour blindness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from grail_lightning.tasks.base import Step, StepKind
from grail_lightning.views.cells import Colour, Page
from grail_lightning.views.lines import Line, fitted, shown, wrap

# Okabe and Ito's colours, told apart by all; the line tells them apart without colour.
STEP_STYLES: dict[StepKind, tuple[str, str]] = {
    "sound": ("#009E73", "solid"),
    "slip": ("#D55E00", "dashed"),
    "misconception": ("#CC79A7", "dashdot"),
    "inherited": ("#0072B2", "dotted"),
    "filler": ("#999999", "dotted"),
}
# A response is as wide as its longest line, within these numbers of columns.
_LEAST, _MOST, _GAP = 45, 72, 3
_TOPS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_GREY = "#666666"
_LABEL = 9  # Columns of the word before a prompt.
_END = "∎"
_SEAM = 0.08  # Columns between two tokens.


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollout:
    """A rollout as a picture shows it.

    Attributes:
        title: One line above it: verdict, reward, advantage, length.
        text: The response.
        tokens: The range of characters of each token, in order of appearance; equal ends for a token without text.
        weights: The weight of each token.
        steps: The labelled steps of the response.
        answer: The range of characters of its answer; None without one.
    """

    title: str
    text: str
    tokens: Sequence[tuple[int, int]]
    weights: Sequence[float]
    steps: Sequence[Step] = ()
    answer: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownGroup:
    """Rollouts of one prompt, which stand side by side.

    Attributes:
        prompt: The prompt as people read it.
        rollouts: The rollouts, from left to right.
    """

    prompt: str
    rollouts: Sequence[ShownRollout]


def heatmap(groups: Sequence[ShownGroup], max_lines: int = 48) -> NDArray[np.uint8]:
    """The picture of groups of rollouts, ``[height, width, 3]``.

    Each token's background shows its weight, each labelled step is underlined in the colour of its kind, and a frame
    marks the answer.

    Args:
        groups: The groups, from top to bottom.
        max_lines: The largest number of lines of a response, at least 2. The middle of a longer one is left out.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ends = scale_of([weight for rollout in rollouts for weight in rollout.weights])
    wide = max((line.stop - line.start for r in rollouts for line in wrap(r.text, _MOST)), default=0)
    width = min(max(wide + 1, _LEAST), _MOST)
    columns = max(2, *(len(group.rollouts) for group in groups)) * (width + _GAP) - _GAP
    prompts = [fitted(group.prompt, columns - _LABEL, 4) for group in groups]
    layouts = [[fitted(rollout.text, width, max_lines) for rollout in group.rollouts] for group in groups]
    heights = [len(prompt) + 3 + max(map(len, layout)) for prompt, layout in zip(prompts, layouts, strict=True)]
    page = Page(columns, sum(heights) + 2.3)
    top = 0.0
    for group, prompt, layout, height in zip(groups, prompts, layouts, heights, strict=True):
        page.write("prompt", 0, top, _GREY)
        for place, line in enumerate(prompt):
            page.write(shown(group.prompt, line), _LABEL, top + place)
        for number, (rollout, lines) in enumerate(zip(group.rollouts, layout, strict=True)):
            left, first = number * (width + _GAP), top + len(prompt) + 0.4
            page.write(rollout.title[:width], left, first, _GREY)
            _draw_response(page, rollout, lines, (left, first + 1.2), ends)
        top += height
    _draw_legend(page, top, ends, {step.kind for rollout in rollouts for step in rollout.steps})
    return page.image()


def scale_of(weights: Sequence[float]) -> tuple[float, float]:
    """The ends of the colour scale: 0, or the smallest weight if it is negative; and a round number above the largest.

    Round ends make pictures of different steps comparable.
    """
    finite = [weight for weight in weights if np.isfinite(weight)]
    largest, smallest = max(finite, default=1.0), min(finite, default=0.0)
    return min(smallest, 0.0), next((top for top in _TOPS if largest <= top), largest)


def colour_of(weight: float, ends: tuple[float, float]) -> tuple[float, float, float]:
    """The background of a weight: white at 1, orange above, purple below; grey for a weight that is not finite."""
    if not np.isfinite(weight):
        return 0.8, 0.8, 0.8
    low, top = ends
    above = weight >= 1
    share = min((weight - 1) / (top - 1) if above else (1 - weight) / (1 - low), 1.0)
    full = (0.95, 0.56, 0.16) if above else (0.60, 0.56, 0.82)
    # The square root shows small differences from 1, which are the most frequent.
    red, green, blue = (1 - share**0.5 * (1 - channel) for channel in full)
    return red, green, blue


def _draw_response(
    page: Page, rollout: ShownRollout, lines: list[Line], at: tuple[float, float], ends: tuple[float, float]
) -> None:
    """Draw the lines of a response from the column and line `at`."""
    left, top = at
    owner, weights = _by_character(rollout)
    for place, line in enumerate(lines):
        y = top + place
        if line.left_out:
            page.write(shown(rollout.text, line), left, y, _GREY)
            continue
        for start, stop in _runs(owner, line):
            page.fill(left + start - line.start + _SEAM, y, stop - start - _SEAM, colour_of(weights[start], ends))
        for step in rollout.steps:
            if between := _overlap(step.start, step.stop, line, rollout.text):
                colour, style = STEP_STYLES[step.kind]
                page.underline(left + between[0] - line.start, y, between[1] - between[0], colour, style=style)
        if rollout.answer and (between := _overlap(*rollout.answer, line, rollout.text)):
            page.frame(left + between[0] - line.start, y, between[1] - between[0])
        for within, character in enumerate(rollout.text[line.start : line.stop]):
            page.write(character, left + within, y, _GREY if character in "\n\t" else "black")
    ending = [w for w, (start, stop) in zip(rollout.weights, rollout.tokens, strict=True) if start == stop]
    if ending and rollout.tokens[-1][0] == rollout.tokens[-1][1]:
        end, bottom = left + lines[-1].stop - lines[-1].start, top + len(lines) - 1
        page.fill(end + _SEAM, bottom, 1, colour_of(ending[-1], ends))
        page.write(_END, end, bottom, _GREY)


def _by_character(rollout: ShownRollout) -> tuple[list[int], list[float]]:
    """The token of each character, -1 without one, and its weight: the mean over the tokens that make it together."""
    size = len(rollout.text)
    owner, total, count = [-1] * size, [0.0] * size, [0] * size
    for token, ((start, stop), weight) in enumerate(zip(rollout.tokens, rollout.weights, strict=True)):
        for place in range(start, min(stop, size)):
            owner[place] = token if owner[place] < 0 else owner[place]
            total[place], count[place] = total[place] + weight, count[place] + 1
    return owner, [t / n if n else 1.0 for t, n in zip(total, count, strict=True)]


def _runs(owner: list[int], line: Line) -> list[tuple[int, int]]:
    """The ranges of a line's characters that belong to one token each."""
    places = range(line.start, line.stop)
    runs = [list(run) for token, run in groupby(places, key=owner.__getitem__) if token >= 0]
    return [(run[0], run[-1] + 1) for run in runs]


def _overlap(start: int, stop: int, line: Line, text: str) -> tuple[int, int] | None:
    """The part of a range of characters in a line, without the line's break; None if there is none."""
    last = line.stop - 1 if text[line.start : line.stop].endswith("\n") else line.stop
    first, last = max(start, line.start), min(stop, last)
    return (first, last) if first < last else None


def _draw_legend(page: Page, line: float, ends: tuple[float, float], kinds: set[StepKind]) -> None:
    """Draw the scale of the weights, and the kinds of steps that occur."""
    low, top = ends
    page.write("weight", 0, line, _GREY)
    parts, width = 48, 0.5
    # The left half of the scale shows the weights below 1, the right half those above.
    for part in range(parts):
        share = (part + 0.5) / parts * 2
        weight = low + (1 - low) * share if share < 1 else 1 + (top - 1) * (share - 1)
        page.fill(12 + part * width, line, width, colour_of(weight, ends))
    for text, column in ((f"{low:.3g}", 11.5), (f"{top:.3g}", 12.5 + parts * width + len(f"{top:.3g}"))):
        page.write(text, column - len(text), line)
    page.write("1", 12 + parts * width / 2 - 0.5, line)
    page.write("steps" if kinds else "", 0, line + 1.2, _GREY)
    column = 12.0
    legend: list[tuple[str, Colour, str]] = [(kind, *STEP_STYLES[kind]) for kind in STEP_STYLES if kind in kinds]
    for kind, colour, style in legend:
        page.write(kind, column, line + 1.2)
        page.underline(column, line + 1.2, len(kind), colour, style=style)
        column += len(kind) + 2
    page.write("answer", 16 + parts * width, line)
    page.frame(15.7 + parts * width, line, 6.6)
