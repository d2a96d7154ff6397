"""A picture of rollouts whose tokens carry their weights as background colour (`grail_lightning.views.colours`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grail_lightning.tasks.base import Step, StepKind
from grail_lightning.views.cells import Page
from grail_lightning.views.colours import LARGEST, colour_of

# Okabe and Ito's colours, told apart by all, and the dashes of the line, which tell them apart without colour.
STEP_STYLES: dict[StepKind, tuple[str, int]] = {
    "sound": ("#009E73", 0),
    "slip": ("#D55E00", 12),
    "misconception": ("#CC79A7", 8),
    "inherited": ("#0072B2", 4),
    "filler": ("#999999", 2),
}
_COLUMNS = 50
"""The largest width of a picture: its text can be read at 360 pixels, the width of TensorBoard's thumbnails."""
_GAP = 2
_LEGEND, _ANSWER = 34, 28  # The columns of the legend, and where it has the answer.
_GREY = "#555555"
_END = "∎"


class Line(NamedTuple):
    """A range of characters of a text.

    Attributes:
        start: The first character.
        stop: The index after the last one.
        left_out: Whether the line stands for characters that are not shown.
    """

    start: int
    stop: int
    left_out: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollout:
    """A rollout as a picture shows it.

    Attributes:
        title: What stands above it.
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
    """Rollouts of one prompt.

    Attributes:
        prompt: The prompt as people read it.
        rollouts: The rollouts, from left to right as far as they fit, then below.
    """

    prompt: str
    rollouts: Sequence[ShownRollout]


def heatmap(groups: Sequence[ShownGroup], max_lines: int = 12) -> NDArray[np.uint8]:
    """The picture of groups of rollouts, ``[height, width, 3]``.

    Each token's background shows its weight, each labelled step is underlined in the colour of its kind, and a frame
    marks the answer. Rollouts of short lines stand side by side, others one below the other.

    Args:
        groups: The groups, from top to bottom.
        max_lines: The largest number of lines of a response, at least 2. The middle of a longer one is left out.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = [text for r in rollouts for text in (r.title, r.text.replace("\n", " \n") + _END)]
    width = min(max((len(line) for text in texts for line in text.split("\n")), default=1), _COLUMNS)
    across = min((_COLUMNS + _GAP) // (width + _GAP), max(len(group.rollouts) for group in groups))
    columns = max(across * (width + _GAP) - _GAP, _LEGEND)
    page, top = Page(columns, sum(5 + len(group.rollouts) * (max_lines + 5) for group in groups) + 4), 0.0
    for group in groups:
        top = 0.5 + _write(page, group.prompt, fitted(group.prompt, columns, 4), (0, top))
        for first in range(0, len(group.rollouts), across):
            row = enumerate(group.rollouts[first : first + across])
            top = 0.8 + max(_draw(page, r, (k * (width + _GAP), top), width, max_lines) for k, r in row)
    if any(rollout.answer for rollout in rollouts):
        page.write("answer", _ANSWER, top)
        page.frame(_ANSWER, top, 6)
    found = {step.kind for rollout in rollouts for step in rollout.steps}
    return page.image(_draw_legend(page, top, [kind for kind in STEP_STYLES if kind in found]))


def wrap(text: str, columns: int) -> list[Line]:
    """The lines of a text, at most `columns` characters wide: broken behind a space, or else anywhere.

    A line break is the last character of its line. A text without characters has one empty line.
    """
    lines: list[Line] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start, start + columns)
        stop = min(start + columns, len(text)) if end < 0 else end + 1
        if end < 0 and stop < len(text) and (space := text.rfind(" ", start + columns // 2, stop)) >= 0:
            stop = space + 1
        lines.append(Line(start, stop))
        start = stop
    return lines or [Line(0, 0)]


def fitted(text: str, columns: int, most: int) -> list[Line]:
    """The lines of a text, at most `most >= 2`; one line stands for those in the middle of a longer text."""
    lines = wrap(text, columns)
    if len(lines) <= most:
        return lines
    head = most // 2
    tail = lines[len(lines) - (most - 1 - head) :]
    until = tail[0].start if tail else len(text)
    return [*lines[:head], Line(lines[head].start, until, left_out=True), *tail]


def shown(text: str, line: Line) -> str:
    """The characters of a line without its break, or a note in place of those that are left out."""
    if line.left_out:
        return f"[… {line.stop - line.start:,} characters …]"
    return text[line.start : line.stop].removesuffix("\n")


def _write(page: Page, text: str, lines: list[Line], at: tuple[float, float], colour: str = "black") -> float:
    """Write the lines of a text from the column and line `at`, and return the line behind them."""
    for place, line in enumerate(lines):
        page.write(shown(text, line), at[0], at[1] + place, colour)
    return at[1] + len(lines)


def _draw(page: Page, rollout: ShownRollout, at: tuple[float, float], width: int, max_lines: int) -> float:
    """Draw a rollout from the column and line `at`, and return the line behind it."""
    left, top = at[0], _write(page, rollout.title, fitted(rollout.title, width, 4), at, _GREY)
    lines = fitted(rollout.text, width, max_lines)
    owner, weights = _by_character(rollout)
    for place, line in enumerate(lines):
        y = top + place
        if line.left_out:
            page.write(shown(rollout.text, line), left, y, _GREY)
            continue
        for start, stop in _runs(owner, line):
            page.fill(left + start - line.start, y, stop - start, colour_of(weights[start]))
        for step in rollout.steps:
            if between := _overlap(step.start, step.stop, line, rollout.text):
                page.underline(left + between[0] - line.start, y, between[1] - between[0], *STEP_STYLES[step.kind])
        if rollout.answer and (between := _overlap(*rollout.answer, line, rollout.text)):
            page.frame(left + between[0] - line.start, y, between[1] - between[0])
        for within, character in enumerate(rollout.text[line.start : line.stop]):
            page.write(character, left + within, y, _GREY if character in "\n\t" else "black")
    if rollout.tokens and rollout.tokens[-1][0] == rollout.tokens[-1][1]:  # The token that ends a response has no text.
        end, bottom = left + lines[-1].stop - lines[-1].start, top + len(lines) - 1
        page.fill(end, bottom, 1, colour_of(rollout.weights[-1]))
        page.write(_END, end, bottom, _GREY)
    return top + len(lines)


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


def _draw_legend(page: Page, line: float, kinds: list[StepKind]) -> float:
    """Draw the scale of the weights and the kinds of steps that occur, and return the line behind them."""
    page.write("weight", 0, line, _GREY)
    for place, weight in enumerate((0, 0.5, 1, 2, LARGEST)):
        page.fill(7 + 4 * place, line, 4, colour_of(weight))
        page.write(f"{'≥' if weight == LARGEST else ''}{weight:g}".center(4), 7 + 4 * place, line)
    column = 0
    for number, kind in enumerate(kinds):
        if number % 3 == 0:
            column, line = 0, line + 1.2
        page.write(kind, column, line)
        page.underline(column, line, len(kind), *STEP_STYLES[kind])
        column += len(kind) + 2
    return line + 1
