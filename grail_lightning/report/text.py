"""The report as text: for a terminal, as Markdown and as CSV. Names are untrusted: no control character reaches it."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from grail_lightning.report.curves import CURVE
from grail_lightning.report.figures import Compared
from grail_lightning.report.sections import Section, Table, tables

LONGEST, TITLE = 80, 160
COLUMNS = (
    *("part", "task", "dataset", "method", "figure", "step", "problems", "seeds", "value", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p", "p_holm", "detectable", "paired_seeds"),
)


def plain(text: str, longest: int = LONGEST) -> str:
    """A text without control characters, which are written out, and of at most so many characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def terminal(sections: Sequence[Section]) -> str:
    """The report as aligned columns."""
    return "\n".join(_lines(sections, markdown=False))


def markdown(sections: Sequence[Section]) -> str:
    """The report as Markdown, with tables that GitHub renders."""
    return "\n".join(_lines(sections, markdown=True))


def comma_separated(sections: Sequence[Section]) -> str:
    """Every figure as one row of CSV, in full precision. What a spreadsheet would take for a formula is quoted."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for record in _records(sections):
        writer.writerow({name: _cell(value) for name, value in record.items()})
    return file.getvalue().rstrip("\n")


def _lines(sections: Sequence[Section], markdown: bool) -> Iterator[str]:
    def said(text: str) -> str:
        return _escaped(plain(text)) if markdown else plain(text)

    for number, section in enumerate(sections):
        if number:
            yield ""
        if section.heading:
            yield f"## {said(section.heading)}" if markdown else said(section.heading)
            yield ""
        for fact in section.facts:
            yield _escaped(printable(fact)) if markdown else printable(fact)
        for table in tables(section):
            yield ""
            title = plain(table.title, TITLE)
            yield f"### {_escaped(title)}" if markdown else title
            if markdown:
                yield ""
            yield from _table(table, said, markdown)
        yield ""
        for note in section.notes:
            yield f"- {_escaped(printable(note))}" if markdown else printable(note)


def printable(text: str) -> str:
    """A text of several sentences without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _table(table: Table, said: Callable[[str], str], markdown: bool) -> Iterator[str]:
    shape = box.MARKDOWN if markdown else box.Box("    \n    \n    \n    \n    \n    \n    \n    \n")
    drawn = RichTable(box=shape, pad_edge=markdown, padding=(0, 1), show_edge=markdown)
    for number, name in enumerate(table.head):
        drawn.add_column(Text(said(name)), justify="left" if number < table.words else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(Text(said(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=100_000, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(drawn)
    for line in captured.get().splitlines():
        if line.strip():
            yield line.rstrip()


def _escaped(text: str) -> str:
    """Text in which nothing is Markdown or HTML. Brackets of intervals are left: they lead nowhere."""
    return re.sub(r"([\\`*_{}<>|#~&])", r"\\\1", text)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    if isinstance(value, str):
        shown = plain(value)
        return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
    return value


def _records(sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    """One record for each figure, and one for each step of a curve."""
    for section in sections:
        for line in (*section.solved, *section.responses):
            known = {"part": "average" if line.average else "dataset", "dataset": line.dataset, "figure": line.figure}
            yield {"task": section.task, **known, "problems": line.problems, **_values(line, section.baseline)}
        for end in section.ends:
            known = {"part": "end", "task": section.task, "figure": CURVE}
            yield {**known, "step": end.step, **_values(end, section.baseline)}
        for curve in section.curves:
            for step, at in zip(curve.steps, curve.band, strict=True):
                known = {"part": "curve", "task": section.task, "method": curve.method, "figure": CURVE}
                limits = {"value": at.value, "low": at.low, "high": at.high}
                yield {**known, "step": step, "seeds": len(curve.seeds), **limits}


def _values(line: Compared, baseline: str | None) -> dict[str, Any]:
    values: dict[str, Any] = {"method": line.method, "seeds": line.seeds}
    values |= {"value": line.estimate.value, "low": line.estimate.low, "high": line.estimate.high}
    if (tested := line.difference) is not None:
        values |= {"baseline": baseline, "difference": tested.value}
        values |= {"difference_low": tested.low, "difference_high": tested.high, "p": tested.p_value}
        values |= {"p_holm": line.corrected, "detectable": line.detectable, "paired_seeds": line.pairs}
    return values
