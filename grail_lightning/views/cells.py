"""A page of characters in cells of equal size, on coloured backgrounds, drawn by matplotlib.

Every character stands in its own cell as the outline of its glyph. Nothing in a text is therefore interpreted: no
mathematics between dollar signs, no direction of writing, no control characters; and the width of a line is known. It
also takes a fraction of the time of matplotlib's own text, which shapes every line.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grail_lightning.views.agg import new_figure, pixels

if TYPE_CHECKING:
    from matplotlib.path import Path

Colour = str | tuple[float, ...]
WIDTH, HEIGHT, MARGIN = 8.0, 18.0, 14.0
"""Pixels of a cell, and around the page."""
_EM = WIDTH / 0.602  # DejaVu Sans Mono advances by 0.602 of its size.
_BASELINE = 0.69  # Of the height of a cell, from above.
_SEEN_AS = {"\t": "→", "\n": "↵", "\r": "↵", "\u00a0": " "}
_NO_GLYPH = "□"
_WIDE = 1100.0  # Pixels, up to which a page is enlarged.


class Page:
    """A page to write on; line 0 is the uppermost, column 0 the leftmost.

    Args:
        columns: The number of columns.
        lines: The number of lines.
    """

    def __init__(self, columns: float, lines: float) -> None:
        self.size = columns * WIDTH + 2 * MARGIN, lines * HEIGHT + 2 * MARGIN
        self._glyphs: list[tuple[float, float, str, Colour]] = []
        self._boxes: list[tuple[float, float, float, float, Colour]] = []
        self._rules: list[tuple[list[tuple[float, float]], Colour, float, str]] = []

    def write(self, text: str, column: float, line: float, colour: Colour = "black") -> None:
        """Write one character a cell, from left to right."""
        for place, character in enumerate(text):
            if (seen := visible(character)) != " ":
                self._glyphs.append((column + place, line, seen, colour))

    def fill(self, column: float, line: float, columns: float, colour: Colour, *, lines: float = 1.0) -> None:
        """Colour the background of cells."""
        self._boxes.append((column, line, columns, lines, colour))

    def underline(self, column: float, line: float, columns: float, colour: Colour, *, style: str = "solid") -> None:
        """Draw a line below cells."""
        y = line + 0.97
        self._rules.append(([(column, y), (column + columns, y)], colour, 2.0, style))

    def frame(self, column: float, line: float, columns: float) -> None:
        """Draw a thin frame around cells."""
        right, top, bottom = column + columns, line + 0.02, line + 1.0
        corners = [(column, top), (right, top), (right, bottom), (column, bottom), (column, top)]
        self._rules.append((corners, "black", 1.0, "solid"))

    def image(self) -> NDArray[np.uint8]:
        """The page as ``[height, width, 3]``. A narrow one is enlarged."""
        from matplotlib.collections import LineCollection, PathCollection, PolyCollection
        from matplotlib.transforms import Affine2D

        zoom = min(max(_WIDE / self.size[0], 1.0), 2.0)
        figure = new_figure(*(round(length * zoom) for length in self.size))
        zoomed = Affine2D().scale(zoom)
        boxes = [self._corners(*box[:4]) for box in self._boxes]
        figure.add_artist(
            PolyCollection(boxes, facecolors=[b[4] for b in self._boxes], edgecolors="none", transform=zoomed)
        )
        figure.add_artist(
            LineCollection(
                [[self._pixel(*point) for point in rule[0]] for rule in self._rules],
                colors=[rule[1] for rule in self._rules],
                linewidths=[rule[2] * zoom for rule in self._rules],
                linestyles=[rule[3] for rule in self._rules],
                transform=zoomed,
            )
        )
        figure.add_artist(
            PathCollection(
                [outline(glyph[2]) for glyph in self._glyphs],
                offsets=[self._pixel(column, line + _BASELINE) for column, line, *_ in self._glyphs] or [(0, 0)],
                offset_transform=zoomed,
                facecolors=[glyph[3] for glyph in self._glyphs],
                edgecolors="none",
                snap=False,  # Rounding to pixels would thicken or remove the strokes of `=`.
                transform=zoomed,
            )
        )
        return pixels(figure)

    def _pixel(self, column: float, line: float) -> tuple[float, float]:
        """From the lower left corner, as Agg counts."""
        return MARGIN + column * WIDTH, self.size[1] - MARGIN - line * HEIGHT

    def _corners(self, column: float, line: float, columns: float, lines: float) -> list[tuple[float, float]]:
        (left, top), (right, bottom) = self._pixel(column, line), self._pixel(column + columns, line + lines)
        return [(left, top), (right, top), (right, bottom), (left, bottom)]


@lru_cache(maxsize=4096)
def visible(character: str) -> str:
    """The character that is drawn for another: a sign for white space, controls and what the fonts do not have.

    The fonts are matplotlib's ``monospace`` (`font.monospace` of its settings) and DejaVu Sans.
    """
    if character in _SEEN_AS:
        return _SEEN_AS[character]
    if unicodedata.category(character)[0] == "Z":
        return " "
    if unicodedata.category(character)[0] == "C":
        return "\ufffd"
    return character if _font_with(character) else _NO_GLYPH


@lru_cache(maxsize=4096)
def outline(character: str) -> Path:
    """The outline of a glyph in pixels, from the left end of its baseline. One too wide for a cell is scaled."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path
    from matplotlib.textpath import TextToPath

    font = _font_with(character)
    assert font is not None, "`visible` chooses characters with a glyph"
    points, codes = TextToPath().get_text_path(FontProperties(fname=font), character)
    if not len(points):  # Some blanks are no white space.
        return Path(np.zeros((0, 2)))
    vertices = np.asarray(points) * _EM / TextToPath.FONT_SCALE
    right = float(vertices[:, 0].max())
    scale = min(1.0, 1.15 * WIDTH / right) if right > 0 else 1.0
    return Path(vertices * scale, codes)


def _font_with(character: str) -> str | None:
    """The file of the first font that has a glyph of a character; None if none has."""
    return next((file for file, known in _fonts() if ord(character) in known), None)


@lru_cache(maxsize=1)
def _fonts() -> list[tuple[str, frozenset[int]]]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    files = [findfont(FontProperties(family=[family])) for family in ("monospace", "DejaVu Sans Mono", "DejaVu Sans")]
    return [(str(file), frozenset(get_font(file).get_charmap())) for file in dict.fromkeys(files)]
