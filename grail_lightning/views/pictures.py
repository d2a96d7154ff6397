"""Pictures of token credit: rollouts whose tokens carry their weights as background colour, and weights by position.

Shapes: ``B`` rows, ``T`` response tokens.

Text from a model is drawn as it is: neither as mathematics nor as directions of writing, and control characters as
signs. A weight of 1, the rollout's advantage unchanged as under GRPO, has no colour; larger weights are orange, smaller
ones blue, here and on the page. All common kinds of colour blindness tell the two hues apart.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grail_lightning.tasks.problem import Step, StepKind

LARGEST = 5.0
"""The weight from which on the colour is full: the one that GRAIL gives to an answer."""
_MORE, _LESS, _NOT_FINITE = (240, 146, 43), (111, 176, 238), (204, 204, 204)  # `--more`, `--less` of palette.css.
_NOT_SAMPLED = (226, 226, 226)
# Okabe and Ito's colours and styles of lines, each of which tells the kinds apart without the other.
STEP_STYLES: dict[StepKind, tuple[str, str]] = {
    "sound": ("#009E73", "solid"),
    "slip": ("#D55E00", "dashed"),
    "misconception": ("#CC79A7", "dashdot"),
    "inherited": ("#0072B2", "dotted"),
    "filler": ("#999999", "dotted"),
}
COLUMNS = 50
"""Characters of a line, so that text can be read at 360 pixels, the width of TensorBoard's thumbnails."""
WIDTH, HEIGHT = 16, 34
"""Pixels of a character."""
_PARTS = 20
_DPI = 100
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
    part = max(weight - 1, -1.0) if weight < 1 else min(math.log(weight) / math.log(LARGEST), 1.0)
    red, green, blue = (round(255 + abs(part) ** 0.75 * (full - 255)) for full in (_MORE if part > 0 else _LESS))
    return red, green, blue


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollout:
    """A rollout as a picture shows it.

    Attributes:
        title: What stands above it.
        text: The response.
        tokens: The range of characters of each token, in order of appearance; equal ends for a token without text.
        weights: The weight of each token; None if the policy did not sample it. A turn begins behind such tokens.
        steps: The labelled steps of the response.
        answer: The range of characters of its answer; None without one.
    """

    title: str
    text: str
    tokens: Sequence[tuple[int, int]]
    weights: Sequence[float | None]
    steps: Sequence[Step] = ()
    answer: tuple[int, int] | None = None


class _Cell(NamedTuple):
    """A character of the picture, with the token that it belongs to, and its marks."""

    character: str
    weight: float | None = 1.0
    token: int | None = None
    kind: StepKind | None = None
    answer: bool = False


def heatmap(groups: Sequence[tuple[str, Sequence[ShownRollout]]], max_lines: int = 12) -> NDArray[np.uint8]:
    """The picture of groups of rollouts, ``[height, width, 3]``.

    Each token's background shows its weight, each labelled step is underlined in the colour of its kind, and a frame
    marks the answer.

    Args:
        groups: The prompt and the rollouts of each group, from top to bottom.
        max_lines: The largest number of lines of a response, at least 2. The middle of a longer one is left out.
    """
    lines: list[list[_Cell]] = []
    for prompt, rollouts in groups:
        lines += _lines(_plain(prompt), 4)
        for rollout in rollouts:
            lines += [[], *_lines(_plain(rollout.title), 4), *_lines(_response(rollout), max_lines)]
        lines.append([])
    shown = [rollout for _, rollouts in groups for rollout in rollouts]
    kinds = {step.kind for rollout in shown for step in rollout.steps}
    marks = [_plain(kind, kind=kind) for kind in STEP_STYLES if kind in kinds]
    marks += [_plain("answer", answer=True)] if any(rollout.answer for rollout in shown) else []
    marks += [_plain("not trained", weight=None)] if any(None in rollout.weights for rollout in shown) else []
    scale = [_plain(f"{weight:g}".center(4), weight=weight) for weight in (0, 0.5, 1, 2, LARGEST)]
    return _draw([*lines, sum(scale, _plain("weight ")), [cell for mark in marks for cell in (*mark, _Cell(" "))]])


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
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans Mono"))


def _draw(lines: Sequence[Sequence[_Cell]]) -> NDArray[np.uint8]:
    colours = np.full((len(lines), COLUMNS, 3), 255, dtype=np.uint8)
    figure, axes = _figure((COLUMNS + 2) * WIDTH / _DPI, (len(lines) + 1) * HEIGHT / _DPI, _DPI, (0, 0, 1, 1))
    axes.set(xlim=(-1, COLUMNS + 1), ylim=(len(lines) + 0.5, -0.5))
    axes.axis("off")
    font = {"family": "DejaVu Sans Mono", "size": WIDTH / 0.602 * 72 / _DPI}  # Its characters are 0.602 wide.
    for row, cells in enumerate(lines):
        text = "".join(visible(cell.character) for cell in cells)
        axes.text(0, row + 0.72, text, fontdict=font, color="black", parse_math=False, usetex=False)
        for column, cell in enumerate(cells):
            colours[row, column] = colour_of(cell.weight)
        axes.vlines([stop for _, stop, _ in _runs([c.token for c in cells])], row, row + 1, color="white", linewidth=1)
        before = lines[row - 1][-1:] if row else []
        pairs = enumerate(pairwise([*before, *cells]), 1 - len(before))
        turns = [place for place, (told, own) in pairs if told.weight is None and own.weight is not None and own.token]
        axes.vlines(turns, row, row + 1, color="black", linewidth=3)
        for start, stop, kind in _runs([cell.kind for cell in cells]):
            colour, style = STEP_STYLES[kind]
            axes.hlines(row + 0.96, start, stop, color=colour, linestyle=style, linewidth=2.2)
        for start, stop, _ in _runs([cell.answer or None for cell in cells]):
            axes.plot([start, stop, stop, start, start], [row, row, row + 1, row + 1, row], color="black", linewidth=2)
    axes.imshow(colours, extent=(0, COLUMNS, len(lines), 0), aspect="auto", interpolation="nearest", zorder=0)
    return _pixels(figure)


def _runs(values: Sequence[Hashable]) -> list[tuple[int, int, Any]]:
    """The ranges of equal values with the value, but for None."""
    runs = [list(run) for _, run in groupby(range(len(values)), key=lambda place: values[place])]
    return [(run[0], run[-1] + 1, values[run[0]]) for run in runs if values[run[0]] is not None]


def _figure(width: float, height: float, dpi: int, place: tuple[float, float, float, float]) -> tuple[Any, Any]:
    """A figure in inches and its axes; without pyplot: no backend to choose, and no figure that stays in memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    figure.set_layout_engine("none")
    return figure, figure.add_axes(place)


def _pixels(figure: Any) -> NDArray[np.uint8]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def profile(weights: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Weights by relative position, ``(t + 0.5) / L`` for token ``t`` of the ``L`` that were sampled.

    Args:
        weights: ``[B, T]``, the token weights.
        mask: ``[B, T]`` bool, the valid response tokens.

    Returns:
        ``[3, 20]``: the mean and the 10 % and 90 % quantiles of the tokens of each of 20 equal parts of the responses;
        NaN for a part without tokens.
    """
    positions = (mask.cumsum(1) - 0.5) / np.maximum(mask.sum(1, keepdims=True), 1)
    parts, found = np.minimum((positions * _PARTS).astype(int), _PARTS - 1), np.full((3, _PARTS), np.nan)
    for part in range(_PARTS):
        values = weights[mask & (parts == part)]
        if len(values):
            found[:, part] = values.mean(), *np.quantile(values, (0.1, 0.9))
    return found


def weight_curves(
    weights: NDArray[np.float32], mask: NDArray[np.bool_], correct: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """The picture, ``[height, width, 3]``: weight against relative position, of right and of wrong rollouts.

    The bands reach from the 10 % to the 90 % quantile of the tokens.

    Args:
        weights: ``[B, T]``, the token weights.
        mask: ``[B, T]`` bool, the valid response tokens.
        correct: ``[B]`` bool.
    """
    # Few pixels an inch would make the text small, and TensorBoard shows pictures at less than half of their width.
    figure, axes = _figure(4, 3, 200, (0.13, 0.15, 0.84, 0.82))
    finite, position = np.isfinite(weights) & mask, (np.arange(_PARTS) + 0.5) / _PARTS
    for name, rows, colour, style in (("right", correct, "#0072B2", "solid"), ("wrong", ~correct, "#D55E00", "dashed")):
        inside = finite & rows[:, None]
        if inside.any():
            mean, low, high = profile(weights, inside)
            axes.fill_between(position, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(position, mean, color=colour, linestyle=style, label=f"{name} ({rows.sum()})")
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set(xlim=(0, 1), xlabel="relative position in the response", ylabel="weight")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return _pixels(figure)
