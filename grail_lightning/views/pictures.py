"""Pictures of token credit: rollouts whose tokens carry their weights as background colour, and weights by position.

Shapes: ``B`` rows, ``T`` response tokens.

Text from a model is drawn as it is: neither as mathematics nor as directions of writing, and control characters as
signs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grail_lightning.tasks.base import Step, StepKind
from grail_lightning.views.colours import LARGEST, colour_of

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
_BINS = 20
_CURVES = {"right": ("#0072B2", "solid"), "wrong": ("#D55E00", "dashed")}
_GREY = "#555555"
_END = "∎"
_SEEN_AS = {"\t": "→", "\n": "↵", "\r": "↵"}


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
    """The prompt of a group as people read it, and its rollouts, from top to bottom."""

    prompt: str
    rollouts: Sequence[ShownRollout]


@dataclass
class _Line:
    """A line of the picture, with the token, the weight and the marks of each character."""

    text: str = ""
    colour: str = "black"
    tokens: Sequence[int] = ()
    weights: Sequence[float] = ()
    steps: Sequence[StepKind | None] = ()
    answer: Sequence[bool] = ()


def heatmap(groups: Sequence[ShownGroup], max_lines: int = 12) -> NDArray[np.uint8]:
    """The picture of groups of rollouts, ``[height, width, 3]``.

    Each token's background shows its weight, each labelled step is underlined in the colour of its kind, and a frame
    marks the answer.

    Args:
        groups: The groups, from top to bottom.
        max_lines: The largest number of lines of a response, at least 2. The middle of a longer one is left out.
    """
    lines: list[_Line] = []
    for group in groups:
        lines += _plain(group.prompt, "black")
        for rollout in group.rollouts:
            lines += [_Line(), *_plain(rollout.title, _GREY), *_response(rollout, max_lines)]
        lines.append(_Line())
    kinds = {step.kind for group in groups for rollout in group.rollouts for step in rollout.steps}
    answers = any(rollout.answer for group in groups for rollout in group.rollouts)
    return _draw([*lines, *_legend([kind for kind in STEP_STYLES if kind in kinds], answers)])


def wrap(text: str, columns: int) -> list[tuple[int, int]]:
    """The ranges of a text's lines, at most `columns` characters wide: broken behind a space, or else anywhere.

    A line break is the last character of its line. A text without characters has one empty line.
    """
    lines: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start, start + columns)
        stop = min(start + columns, len(text)) if end < 0 else end + 1
        if end < 0 and stop < len(text) and (space := text.rfind(" ", start + columns // 2, stop)) >= 0:
            stop = space + 1
        lines.append((start, stop))
        start = stop
    return lines or [(0, 0)]


def visible(character: str) -> str:
    """The character that is drawn for another: a sign for line breaks and tabs, and a box for what cannot be drawn."""
    if character in _SEEN_AS:
        return _SEEN_AS[character]
    if unicodedata.category(character)[0] == "Z":
        return " "
    # Marks and letters that are written to the left would not stay in their places.
    moves = unicodedata.category(character)[0] in "CM" or unicodedata.bidirectional(character) in ("R", "AL", "AN")
    return "□" if moves or not _font().get_char_index(ord(character)) else character


@lru_cache(maxsize=1)
def _font() -> Any:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return get_font(findfont(FontProperties(family=["DejaVu Sans Mono"])))


def _plain(text: str, colour: str, most: int = 4) -> list[_Line]:
    lines = [_Line(text[start:stop].removesuffix("\n"), colour) for start, stop in wrap(text, COLUMNS)]
    return lines if len(lines) <= most else [*lines[: most - 1], _Line("[…]", _GREY)]


def _response(rollout: ShownRollout, max_lines: int) -> list[_Line]:
    """The lines of a response; one line stands for those in the middle of a longer one."""
    ends = bool(rollout.tokens) and rollout.tokens[-1][0] == rollout.tokens[-1][1]
    text = rollout.text + _END * ends  # The token that ends a response has no text.
    tokens, total, count = [-1] * len(text), [0.0] * len(text), [0] * len(text)
    for token, ((start, stop), weight) in enumerate(zip(rollout.tokens, rollout.weights, strict=True)):
        last = ends and token == len(rollout.tokens) - 1
        for place in [len(text) - 1] if last else range(start, min(stop, len(rollout.text))):
            tokens[place] = token if tokens[place] < 0 else tokens[place]
            total[place], count[place] = total[place] + weight, count[place] + 1
    # Tokens that make a character together have their mean weight there.
    weights = [t / n if n else 1.0 for t, n in zip(total, count, strict=True)]
    steps: list[StepKind | None] = [None] * len(text)
    for step in rollout.steps:
        steps[step.start : step.stop] = [step.kind] * (min(step.stop, len(text)) - step.start)
    first, behind = rollout.answer or (0, 0)
    answer = [first <= place < behind for place in range(len(text))]
    lines = [
        _Line(text[a:b], "black", tokens[a:b], weights[a:b], steps[a:b], answer[a:b]) for a, b in wrap(text, COLUMNS)
    ]
    if len(lines) <= max_lines:
        return lines
    head, tail = lines[: max_lines // 2], lines[len(lines) - (max_lines - 1) // 2 :] if max_lines > 2 else []
    left_out = len(text) - sum(len(line.text) for line in (*head, *tail))
    return [*head, _Line(f"[… {left_out:,} characters …]", _GREY), *tail]


def _legend(kinds: Sequence[StepKind], answers: bool) -> list[_Line]:
    """The scale of the weights, and the marks that occur."""
    scale = [0.0, 0.5, 1.0, 2.0, LARGEST]
    cells = [f"{'≥' if weight == LARGEST else ''}{weight:g}".center(4) for weight in scale]
    tokens = [-1] * 7 + [number for number, cell in enumerate(cells) for _ in cell]
    first = _Line("weight " + "".join(cells), _GREY, tokens, [1.0] * 7 + [w for w in scale for _ in range(4)])
    marks = _Line("", _GREY)
    names: list[tuple[str, StepKind | None]] = [(kind, kind) for kind in kinds]
    for name, kind in [*names, *[("answer", None)] * answers]:
        marks.text += f"{name} "
        marks.steps = [*marks.steps, *[kind] * len(name), None]
        marks.answer = [*marks.answer, *[kind is None] * len(name), False]
    return [first, marks]


def _draw(lines: Sequence[_Line]) -> NDArray[np.uint8]:
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    dpi, cells = 100, np.full((len(lines), COLUMNS, 3), 255, dtype=np.uint8)
    size = (COLUMNS + 2) * WIDTH / dpi, (len(lines) + 1) * HEIGHT / dpi
    figure = Figure(figsize=size, dpi=dpi, facecolor="white")
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, COLUMNS + 1), ylim=(len(lines) + 0.5, -0.5))
    axes.axis("off")
    font = FontProperties(family=["DejaVu Sans Mono"], size=WIDTH / 0.602 * 72 / dpi)  # Its characters are 0.602 wide.
    seams = []  # Between tokens.
    for row, line in enumerate(lines):
        text = "".join(map(visible, line.text[:COLUMNS]))
        axes.text(0, row + 0.72, text, color=line.colour, fontproperties=font, parse_math=False, usetex=False)
        for column, weight in enumerate(line.weights):
            cells[row, column] = colour_of(weight)
        seams += [(stop, row) for _, stop in _runs(line.tokens, -1)]
        for start, stop in _runs(line.steps, None):
            colour, style = STEP_STYLES[line.steps[start]]  # type: ignore[index]
            axes.hlines(row + 0.96, start, stop, color=colour, linestyle=style, linewidth=2.2)
        for start, stop in _runs(line.answer, False):
            axes.plot([start, stop, stop, start, start], [row, row, row + 1, row + 1, row], color="black", linewidth=2)
    places, rows = np.array(seams).T
    axes.vlines(places, rows, rows + 1, color="white", linewidth=1.0)
    axes.imshow(cells, extent=(0, COLUMNS, len(lines), 0), aspect="auto", interpolation="nearest", zorder=0)
    return _pixels(figure)


def _pixels(figure: Any) -> NDArray[np.uint8]:
    """What a figure looks like; without pyplot: no backend to choose, and no figure that stays in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _runs(values: Sequence[object], without: object) -> list[tuple[int, int]]:
    """The ranges of equal values, but for one of them."""
    runs, start = [], 0
    for value, run in groupby(values):
        stop = start + sum(1 for _ in run)
        if value != without:
            runs.append((start, stop))
        start = stop
    return runs


class Profile(NamedTuple):
    """Weights by relative position.

    Attributes:
        position: ``[20]``, the middles of equal parts of a response, from 0 (its beginning) to 1.
        mean: ``[20]``, the mean weight of the tokens of each part; NaN for a part without tokens.
        low: ``[20]``, their 10 % quantile.
        high: ``[20]``, their 90 % quantile.
    """

    position: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def profile(weights: NDArray[np.float32], mask: NDArray[np.bool_]) -> Profile:
    """Mean and quantiles of the weights at each relative position, ``(t + 0.5) / L`` for token ``t`` of ``L``.

    Args:
        weights: ``[B, T]``, the token weights.
        mask: ``[B, T]`` bool, the valid response tokens.
    """
    lengths = np.maximum(mask.sum(1, keepdims=True), 1)
    positions = (np.arange(mask.shape[1])[None] + 0.5) / lengths
    parts = np.minimum((positions * _BINS).astype(int), _BINS - 1)[mask]
    order = np.argsort(parts, kind="stable")
    cuts = np.searchsorted(parts[order], np.arange(1, _BINS))
    quantities = np.full((3, _BINS), np.nan)
    for part, values in enumerate(np.split(weights[mask][order], cuts)):
        if len(values):
            quantities[:, part] = values.mean(), *np.quantile(values, (0.1, 0.9))
    return Profile((np.arange(_BINS) + 0.5) / _BINS, *quantities)


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
    from matplotlib.figure import Figure

    # Few pixels an inch would make the text small, and TensorBoard shows pictures at less than half of their width.
    figure = Figure(figsize=(4, 3), dpi=200, facecolor="white")
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.13, 0.15, 0.84, 0.82))
    finite = np.isfinite(weights) & mask
    for name, rows in (("right", correct), ("wrong", ~correct)):
        inside = finite & rows[:, None]
        if inside.any():
            by_part, (colour, style) = profile(weights, inside), _CURVES[name]
            axes.fill_between(by_part.position, by_part.low, by_part.high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(by_part.position, by_part.mean, color=colour, linestyle=style, label=f"{name} ({rows.sum()})")
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set(xlim=(0, 1), xlabel="relative position in the response", ylabel="weight")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return _pixels(figure)
