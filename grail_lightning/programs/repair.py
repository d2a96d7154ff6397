"""Which lines of a wrong program would have to be those of a reference. Programs are text: nothing is parsed or run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import combinations
from typing import NamedTuple

MOST_LINES = 100
MOST_EDITS = 5  # Lines. Any of them may be needed together: 31 repairs.
_LINE = re.compile(r"[^\n]+")


class ProgramLine(NamedTuple):
    """A line that is not empty: its indentation, its text, and where this begins in the program."""

    indent: str
    text: str
    start: int


class Edit(NamedTuple):
    """The lines ``start`` to ``stop`` of a program, and those that the reference has there; either may be none."""

    start: int
    stop: int
    reference_start: int
    reference_stop: int


def program_lines(program: str) -> list[ProgramLine]:
    """The lines that are not empty."""
    parts = ((match, match[0].lstrip()) for match in _LINE.finditer(program))
    return [ProgramLine(m[0][: len(m[0]) - len(t)], t.rstrip(), m.end() - len(t)) for m, t in parts if t]


def edits(lines: Sequence[ProgramLine], reference: Sequence[ProgramLine]) -> list[Edit] | None:
    """The places at which a program differs from a reference other than in blanks; None if there are too many."""
    if max(len(lines), len(reference)) > MOST_LINES:
        return None
    own, other = ([(len(x.indent.expandtabs(4)), "".join(x.text.split())) for x in both] for both in (lines, reference))
    places = []
    for tag, a, b, c, d in SequenceMatcher(None, own, other, autojunk=False).get_opcodes():
        if tag == "replace" and b - a == d - c:  # Line by line.
            places += [Edit(a + k, a + k + 1, c + k, c + k + 1) for k in range(b - a)]
        elif tag != "equal":
            places.append(Edit(a, b, c, d))
    lines_of = [max(edit.stop - edit.start, edit.reference_stop - edit.reference_start) for edit in places]
    return places if sum(lines_of) <= MOST_EDITS else None


def repairs(
    lines: Sequence[ProgramLine], reference: Sequence[ProgramLine], places: Sequence[Edit], size: int
) -> Iterator[tuple[tuple[Edit, ...], str]]:
    """Every choice of so many edits, the earliest places first, with the program in which they are made."""
    for chosen in combinations(places, size):
        made, at = list[ProgramLine](), 0
        for edit in chosen:
            made += [*lines[at : edit.start], *reference[edit.reference_start : edit.reference_stop]]
            at = edit.stop
        yield chosen, "\n".join(line.indent + line.text for line in [*made, *lines[at:]])
