"""Text in lines of a given width, of which a long text loses those in its middle."""

from __future__ import annotations

from typing import NamedTuple


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
    """The lines of a text, at most `most`; one line stands for those in the middle of a longer text.

    Args:
        text: The text.
        columns: The width of a line in characters.
        most: The largest number of lines, at least 2.
    """
    lines = wrap(text, columns)
    if len(lines) <= most:
        return lines
    head = most // 2
    tail = lines[len(lines) - (most - 1 - head) :]
    until = tail[0].start if tail else len(text)
    return [*lines[:head], Line(lines[head].start, until, left_out=True), *tail]


def shown(text: str, line: Line) -> str:
    """The characters of a line, or a note in place of those that are left out."""
    return f"[… {line.stop - line.start:,} characters …]" if line.left_out else text[line.start : line.stop]
