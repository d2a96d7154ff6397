"""Learning curves as an SVG that stands in a page, in the page's own colours.

Matplotlib draws in placeholder colours and in style attributes, which the page's policy forbids. Here each style
becomes a class of the page's style sheet, and each placeholder a colour of the page, which may be light or dark.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grail_lightning.report.curves import CURVE, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As many colours as the style sheet has; curves beyond them are told apart by their dashes.
COLOURS = 8
DASHES = ("none", "5 2", "1 1.5", "6 2 1 2")
_INK, _LINE = "#fefe01", "#fefe02"
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"


def dash(number: int) -> str:
    """The dashes of a curve in widths of its line, as SVG writes them: neighbours differ without colour, too."""
    return DASHES[(number + number // COLOURS) % len(DASHES)]


def placeholder(number: int) -> str:
    """The colour in which matplotlib draws a curve."""
    return f"#fe00{number % COLOURS:02x}"


def curves_svg(curves: Sequence[Curve], prefix: str) -> tuple[str, str]:
    """The picture as SVG, and the rules of its classes for the page's style sheet.

    Args:
        curves: The learning curves.
        prefix: What the names of classes and identifiers begin with; another one for each picture of a page.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for number, curve in enumerate(curves):
            _draw(axes, number, curve)
        axes.set(xlabel="optimiser steps", ylabel=CURVE)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_LINE)
        axes.tick_params(colors=_INK, color=_LINE)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set_color(_INK)
        axes.grid(color=_LINE, linewidth=0.4)
        written = io.BytesIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _adopted(written.getvalue().decode(), prefix)


def _draw(axes: Axes, number: int, curve: Curve) -> None:
    band, colour = curve.band, placeholder(number)
    means = [at.value for at in band]
    if not any(math.isnan(at.low) for at in band):
        low, high = [at.low for at in band], [at.high for at in band]
        axes.fill_between(curve.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    line = "solid" if dash(number) == "none" else (0, [float(part) for part in dash(number).split()])
    axes.plot(curve.steps, means, color=colour, linewidth=1.6, linestyle=line, marker="o", markersize=2.5)


def _adopted(written: str, prefix: str) -> tuple[str, str]:
    """The SVG element without style attributes, and its rules."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(written)  # noqa: S314  (matplotlib has just written it)
    rules: dict[str, str] = {}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style", "title"):
                parent.remove(child)
    used = set(re.findall(r"url\(#([^)]+)\)", written)) | set(re.findall(r'xlink:href="#([^"]+)"', written))
    for element in root.iter():
        if (style := element.attrib.pop("style", None)) is not None:
            name = rules.setdefault(_in_page_colours(style), f"{prefix}-{len(rules)}")
            element.set("class", name)
        if (identity := element.get("id")) is not None:
            if identity in used:
                element.set("id", f"{prefix}-{identity}")
            else:
                del element.attrib["id"]
        if (link := element.get(_LINK)) is not None:
            element.set(_LINK, f"#{prefix}-{link[1:]}")
        if (clip := element.get("clip-path")) is not None:
            element.set("clip-path", clip.replace("url(#", f"url(#{prefix}-"))
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-label", f"{CURVE} against optimiser steps; the table has the numbers")
    style_sheet = "\n".join(f".{name} {{ {rule} }}" for rule, name in rules.items())
    return ET.tostring(root, encoding="unicode"), style_sheet


def _in_page_colours(style: str) -> str:
    style = style.replace(_INK, "var(--ink)").replace(_LINE, "var(--line)")
    return re.sub(r"#fe00([0-9a-f]{2})", lambda found: f"var(--curve-{int(found[1], 16)})", style)
