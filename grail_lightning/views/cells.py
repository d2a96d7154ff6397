"""A page of characters in cells of equal size, on coloured backgrounds, drawn by Pillow.

Every character is drawn by itself in its own cell. Nothing in a text is therefore interpreted, neither directions of
writing nor control characters, and the width of a line is known.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

Colour = str | tuple[int, int, int]
WIDTH, HEIGHT, MARGIN = 16, 34, 16
"""Pixels of a cell, and around the page: large, since TensorBoard shows pictures at less than half of their width."""
_EM = WIDTH / 0.602  # DejaVu Sans Mono advances by 0.602 of its size.
_SEEN_AS = {"\t": "→", "\n": "↵", "\r": "↵"}


class Page:
    """A page to write on; line 0 is the uppermost, column 0 the leftmost.

    Args:
        columns: The number of columns.
        lines: The largest number of lines.
    """

    def __init__(self, columns: float, lines: float) -> None:
        from PIL import Image, ImageDraw

        self._image = Image.new(
            "RGB", (round(columns * WIDTH) + 2 * MARGIN, round(lines * HEIGHT) + 2 * MARGIN), "white"
        )
        self._draw = ImageDraw.Draw(self._image)

    def write(self, text: str, column: float, line: float, colour: Colour = "black") -> None:
        """Write one character a cell, from left to right."""
        for place, character in enumerate(text):
            if (seen := visible(character)) != " ":
                x, y = _pixel(column + place, line + 0.72)
                self._draw.text((x, y), seen, colour, _font(seen), anchor="ls")

    def fill(self, column: float, line: float, columns: float, colour: Colour) -> None:
        """Colour the background of cells, but for a seam at their right."""
        (left, top), (right, bottom) = _pixel(column, line), _pixel(column + columns, line + 1)
        self._draw.rectangle((left, top, right - 2, bottom - 4), colour)

    def underline(self, column: float, line: float, columns: float, colour: Colour, dash: int = 0) -> None:
        """Draw a line below cells: whole, or in dashes of so many pixels."""
        (left, y), (right, _) = _pixel(column, line + 1), _pixel(column + columns, line)
        for x in range(left, right, 2 * dash or right - left):
            self._draw.rectangle((x, y - 4, min(x + (dash or right - left), right) - 1, y - 1), colour)

    def frame(self, column: float, line: float, columns: float) -> None:
        """Draw a frame around cells."""
        (left, top), (right, bottom) = _pixel(column, line), _pixel(column + columns, line + 1)
        self._draw.rectangle((left - 2, top - 1, right, bottom - 4), outline="black", width=3)

    def image(self, lines: float) -> NDArray[np.uint8]:
        """The first lines of the page, ``[height, width, 3]``."""
        return np.asarray(self._image)[: round(lines * HEIGHT) + 2 * MARGIN].copy()


def visible(character: str) -> str:
    """The character that is drawn for another: a sign for line breaks, tabs and controls, and a space for spaces."""
    if character in _SEEN_AS:
        return _SEEN_AS[character]
    category = unicodedata.category(character)[0]
    return " " if category == "Z" else "\ufffd" if category == "C" else character


def _pixel(column: float, line: float) -> tuple[int, int]:
    return MARGIN + round(column * WIDTH), MARGIN + round(line * HEIGHT)


@lru_cache(maxsize=4096)
def _font(character: str) -> FreeTypeFont:
    """Matplotlib's ``monospace``, smaller for a character too wide for a cell. It draws a box for one it has not."""
    font = _of_size(_EM)
    return font if (width := font.getlength(character)) <= WIDTH + 1 else _of_size(_EM * WIDTH / width)


@lru_cache(maxsize=16)
def _of_size(size: float) -> FreeTypeFont:
    from matplotlib.font_manager import FontProperties, findfont
    from PIL import ImageFont

    file = findfont(FontProperties(family=["monospace"]))
    return ImageFont.truetype(file, size, layout_engine=ImageFont.Layout.BASIC)  # The other one joins and reorders.
