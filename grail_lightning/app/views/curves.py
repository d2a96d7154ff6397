"""The HTML page of a report: learning curves as SVG, tables and notes, in one file that needs no network.

Names of methods and datasets are untrusted: Jinja2 escapes them, and the page's policy lets no program run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grail_lightning.app.views.page import rendered

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 320, 52, 16, 12, 44
_COLOURS = 8  # Of report.css; further methods have the same ones with dashes.


class Point(NamedTuple):
    """A point of a learning curve, over the seeds of a method."""

    step: float
    value: float
    low: float  # Of the interval; NaN without one, as `high`.
    high: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the page."""

    title: str
    figure: str  # What the curves show.
    curves: Mapping[str, Sequence[Point]]  # By method.
    table: str  # As HTML, in which names are escaped.
    notes: Sequence[str]


def report_page(parts: Sequence[Part], title: str = "Comparison of runs") -> str:
    """The page as HTML."""
    from markupsafe import Markup

    return rendered(
        "report",
        title=title,
        parts=[(part, drawn(part.curves), Markup(part.table)) for part in parts],  # noqa: S704  (escaped by pandas)
    )


def drawn(curves: Mapping[str, Sequence[Point]], width: int = _WIDTH) -> dict[str, object] | None:
    """The places of ticks, lines and bands in a picture for curves.svg.j2; None without a point."""
    from matplotlib.ticker import MaxNLocator

    points = [point for curve in curves.values() for point in curve]
    if not points:
        return None
    limits = [x for point in points for x in (point.value, point.low, point.high) if math.isfinite(x)]
    steps = [point.step for point in points]
    located = MaxNLocator(width // 76, integer=True, steps=[1, 2, 5, 10]).tick_values(min(steps), max(steps))
    x_ticks = _within(located, min(steps), max(steps))
    y_ticks = [float(tick) for tick in MaxNLocator(6).tick_values(max(0.0, min(limits)), min(1.0, max(limits)))]

    def x(step: float) -> float:
        share = (step - min(steps)) / (max(steps) - min(steps)) if max(steps) > min(steps) else 0.5
        return round(_LEFT + share * (width - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (min(max(value, y_ticks[0]), y_ticks[-1]) - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 1)

    lines = []
    for number, (method, curve) in enumerate(curves.items()):
        banded = [point for point in curve if math.isfinite(point.low) and math.isfinite(point.high)]
        band = [(x(p.step), y(p.high)) for p in banded] + [(x(p.step), y(p.low)) for p in reversed(banded)]
        lines.append(
            {
                "method": method,
                "kind": f"c{number % _COLOURS} d{min(number // _COLOURS, 2)}",
                "line": _path((x(p.step), y(p.value)) for p in curve),
                "band": _path(band),
                "points": [(x(p.step), y(p.value), f"{method}, step {p.step:g}: {_said(p)}") for p in curve],
                "last": f"{_said(curve[-1])} at step {curve[-1].step:g}",
            }
        )
    edges = {"left": _LEFT, "right": width - _RIGHT, "bottom": _HEIGHT - _BOTTOM}
    return {
        "size": {"width": width, "height": _HEIGHT} | edges,
        "lines": lines,
        "x_ticks": [(x(tick), f"{tick:g}") for tick in x_ticks],
        "y_ticks": [(y(tick), f"{tick:.3g}") for tick in y_ticks],
    }


def _within(ticks: Sequence[float], low: float, high: float) -> list[float]:
    return [float(tick) for tick in ticks if low <= tick <= high]


def _path(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _said(point: Point) -> str:
    interval = f" [{point.low:.3f}, {point.high:.3f}]" if math.isfinite(point.low) else ""
    return f"{point.value:.3f}{interval}, {point.seeds} seed{'s' * (point.seeds != 1)}"
