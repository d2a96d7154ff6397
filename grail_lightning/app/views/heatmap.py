"""The picture of rollouts whose tokens carry their weights as background colour.

Text from a model is drawn as it is: neither as mathematics nor as directions of writing, and control characters as
signs. A weight of 1, the rollout's advantage unchanged as under `Uniform`, has no colour; larger weights are orange,
smaller ones blue, here and on the page. All common kinds of colour blindness tell the two hues apart.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grail_lightning.core.records.task import Step, StepKind

LARGEST = 5.0
"""The weight from which on the colour is full: the one that GRAIL gives to an answer."""
_MORE, _LESS, _NOT_FINITE = (240, 146, 43), (111, 176, 238), (204, 204, 204)  # `--more`, `--less` of palette.css.
_NOT_SAMPLED = (226, 226, 226)
STEP_COLOURS: dict[StepKind, str] = {  # Okabe and Ito's.
    "sound": "#009E73",
    "slip": "#D55E00",
    "misconception": "#CC79A7",
    "inherited": "#0072B2",
    "filler": "#999999",
}
COLUMNS = 50
"""Characters of a line, so that text can be read at 360 pixels, the width of TensorBoard's thumbnails."""
WIDTH, HEIGHT = 16, 34
"""Pixels of a character."""
_MOST_LINES = 12  # Of a response.
_SEEN_AS = {"\t": "→", "\n": "↵", "\r": "↵"}
# A line ends behind a line break, at the end of the text, behind a space where there is one, or else anywhere.
_LINE = re.compile(rf"[^\n]{{,{COLUMNS - 1}}}\n|[^\n]{{1,{COLUMNS}}}\Z|[^\n]{{,{COLUMNS - 1}}} |[^\n]{{1,{COLUMNS}}}")


def colour_of(weight: float | None) -> tuple[int, int, int]:
    """The background of a token of this weight on white, as red, green and blue up to 255; grey if it is not finite.

    It is full at 0 and at `LARGEST`. `draw.js` has the same formula for the page. None is a token that was not sampled.
    """
    if weight is None:
        return _NOT_SAMPLED
    if not math.isfinite(weight):
        return _NOT_FINITE
    part = shade_of(weight)
    red, green, blue = (round(255 + abs(part) * (full - 255)) for full in (_MORE if part > 0 else _LESS))
    return red, green, blue


def shade_of(weight: float) -> float:
    """How strong the colour of a finite weight is, from -1 (blue: no credit) by 0 (1.0, as `Uniform`) to 1 (orange)."""
    part = max(weight - 1, -1.0) if weight < 1 else min(math.log(weight) / math.log(LARGEST), 1.0)
    return math.copysign(abs(part) ** 0.75, part)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollout:
    """A rollout as a picture shows it."""

    title: str  # What stands above it.
    text: str  # The response.
    tokens: Sequence[tuple[int, int]]  # The characters of each token, in order; equal ends for one without text.
    weights: Sequence[float | None]  # None if the policy did not sample it. A turn begins behind such tokens.
    steps: Sequence[Step] = ()  # The labelled steps.
    answer: tuple[int, int] | None = None  # The characters of the answer; None without one.


class _Cell(NamedTuple):
    """A character of the picture, with the token that it belongs to, and its marks."""

    character: str
    weight: float | None = 1.0
    token: int | None = None
    kind: StepKind | None = None
    answer: bool = False


def heatmap(prompt: str, rollouts: Sequence[ShownRollout]) -> NDArray[np.uint8]:
    """The picture of some rollouts of a prompt, ``[height, width, 3]``.

    Each token's background shows its weight, each labelled step is underlined in the colour of its kind, and a frame
    marks the answer. The middle of a long response is left out.
    """
    lines = _lines(_plain(prompt), 4)
    for rollout in rollouts:
        lines += [[], *_lines(_plain(rollout.title), 4), *_lines(_response(rollout), _MOST_LINES)]
    kinds = {step.kind for rollout in rollouts for step in rollout.steps}
    marks = [_plain(kind, kind=kind) for kind in STEP_COLOURS if kind in kinds]
    marks += [_plain("answer", answer=True)] if any(rollout.answer for rollout in rollouts) else []
    marks += [_plain("not trained", weight=None)] if any(None in rollout.weights for rollout in rollouts) else []
    scale = [_plain(f"{weight:g}".center(4), weight=weight) for weight in (0, 0.5, 1, 2, LARGEST)]
    return _draw([*lines, [], sum(scale, _plain("weight ")), [cell for mark in marks for cell in (*mark, _Cell(" "))]])


def _plain(text: str, **marks: Any) -> list[_Cell]:
    return [_Cell(character, **marks) for character in text]


def _response(rollout: ShownRollout) -> list[_Cell]:
    """The characters of a response. The first of several tokens that share a character has it, as on the page."""
    cells: list[_Cell] = [_Cell(character) for character in rollout.text]
    for token, ((start, stop), weight) in enumerate(zip(rollout.tokens, rollout.weights, strict=True)):
        for place in range(start, min(stop, len(cells))):
            if cells[place].token is None:
                cells[place] = cells[place]._replace(token=token, weight=weight)
    for step in rollout.steps:
        cells[step.start : step.stop] = [cell._replace(kind=step.kind) for cell in cells[step.start : step.stop]]
    first, behind = rollout.answer or (0, 0)
    cells[first:behind] = [cell._replace(answer=True) for cell in cells[first:behind]]
    if rollout.tokens and rollout.tokens[-1][0] == rollout.tokens[-1][1]:  # The token that ends it has no text.
        cells.append(_Cell("∎", rollout.weights[-1], len(rollout.tokens) - 1))
    return cells


def _lines(cells: list[_Cell], most: int) -> list[list[_Cell]]:
    """The characters in lines; one line stands for those in the middle of a longer text."""
    text = "".join(cell.character for cell in cells)
    lines = [cells[line.start() : line.end()] for line in _LINE.finditer(text)]
    if len(lines) <= most:
        return lines
    head, tail = lines[: most // 2], lines[len(lines) - (most - 1) // 2 :]
    left_out = len(text) - sum(map(len, [*head, *tail]))
    return [*head, _plain(f"[… {left_out:,} characters …]"), *tail]


def visible(character: str) -> str:
    """The character that is drawn for another: a sign for line breaks and tabs, and a box for what cannot be drawn."""
    category = unicodedata.category(character)[0]
    if character in _SEEN_AS or category == "Z":
        return _SEEN_AS.get(character, " ")
    # Marks and letters that are written to the left would not stay in their places.
    moves = category in "CM" or unicodedata.bidirectional(character) in ("R", "AL", "AN")
    return "□" if moves or not _font().get_char_index(ord(character)) else character


@lru_cache(maxsize=1)
def _font() -> Any:
    """The font as matplotlib, which brings it along, reads it."""
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans Mono"))


def _draw(lines: Sequence[Sequence[_Cell]]) -> NDArray[np.uint8]:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(_font().fname, size=WIDTH / 0.602)  # Its characters are 0.602 wide.
    image = Image.new("RGB", ((COLUMNS + 2) * WIDTH, (len(lines) + 1) * HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    before = _Cell(" ")  # The last character of the line before, too: a turn may begin with a line.
    for row, cells in enumerate(lines):
        top = HEIGHT // 2 + row * HEIGHT
        bottom = top + HEIGHT
        for column, cell in enumerate(cells):
            left, right = (column + 1) * WIDTH, (column + 2) * WIDTH
            draw.rectangle((left, top, right - 1, bottom - 1), fill=colour_of(cell.weight))
            if cell.token != before.token:
                draw.line((left, top, left, bottom - 1), fill="white")
            if before.weight is None and cell.weight is not None and cell.token:
                draw.line((left, top, left, bottom - 1), fill="black", width=3)
            before = cell
        for column, cell in enumerate(cells):
            left, right = (column + 1) * WIDTH, (column + 2) * WIDTH
            draw.text((left, bottom - 9), visible(cell.character), fill="black", font=font, anchor="ls")
            if cell.kind:
                draw.rectangle((left, bottom - 3, right - 1, bottom), fill=STEP_COLOURS[cell.kind])
            if cell.answer:
                for y in (top, bottom - 2):
                    draw.rectangle((left, y, right - 1, y + 1), fill="black")
                for x, inside in ((left, cells[:column][-1:]), (right - 2, cells[column + 1 : column + 2])):
                    if not any(neighbour.answer for neighbour in inside):
                        draw.rectangle((x, top, x + 1, bottom - 1), fill="black")
    return np.asarray(image)
