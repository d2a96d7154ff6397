"""The report as one self-contained HTML page: no program, nothing fetched, light and dark.

Names of methods and datasets are untrusted: the template escapes them, and the page's policy allows no program at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from grail_lightning.report.figures import Compared
from grail_lightning.report.plot import COLOURS, curves_svg, dash
from grail_lightning.report.sections import Section, Table, tables
from grail_lightning.report.text import TITLE, plain, printable
from grail_lightning.views.colours import asset
from grail_lightning.views.page import policy_hash

_WIDTH = 100.0


def page(sections: Sequence[Section]) -> str:
    """The page as HTML.

    Args:
        sections: The report, one section for each task.
    """
    import jinja2
    from markupsafe import Markup

    own = resources.files("grail_lightning.report").joinpath("templates", "report.css").read_text(encoding="utf-8")
    style, shown = [asset("palette.css"), own], []
    for number, section in enumerate(sections):
        picture = None
        if section.curves:
            svg, rules = curves_svg(section.curves, f"plot{number}")
            style.append(rules)
            picture = {
                "svg": Markup(svg),  # noqa: S704  (matplotlib's, with no text but ours)
                "names": [(plain(curve.method), k % COLOURS, dash(k)) for k, curve in enumerate(section.curves)],
            }
        shown.append(
            {
                "heading": plain(section.heading),
                "facts": [printable(fact) for fact in section.facts],
                "tables": [_table(table) for table in tables(section)],
                "picture": picture,
                "notes": [printable(note) for note in section.notes],
            }
        )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("grail_lightning.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    sheet = "\n".join(style)
    return environment.get_template("report.html.j2").render(
        sections=shown,
        style=Markup(sheet),  # noqa: S704  (our own files, and rules made of matplotlib's)
        style_hash=policy_hash(sheet),
    )


def _table(table: Table) -> dict[str, Any]:
    rows = [[plain(cell) for cell in row] for row in table.rows]
    bars = _bars(table.lines)
    return {
        "title": plain(table.title, TITLE),
        "head": table.head,
        "words": table.words,
        "rows": [{"cells": cells, "bar": bar} for cells, bar in zip(rows, bars or [None] * len(rows), strict=True)],
        "bars": bool(bars),
    }


def _bars(lines: Sequence[Compared]) -> list[dict[str, float] | None]:
    """Each figure's interval on an axis that all lines of the table share, from 0 to 100."""
    known = [line.estimate for line in lines if not math.isnan(line.estimate.low)]
    if not known:
        return []
    low, high = min(found.low for found in known), max(found.high for found in known)
    scale = _WIDTH / (high - low) if high > low else 0.0
    return [
        None
        if math.isnan(found.low)
        else {name: round((getattr(found, name) - low) * scale, 2) for name in ("low", "value", "high")}
        for found in (line.estimate for line in lines)
    ]
