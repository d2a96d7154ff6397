"""What the page of a report draws: forest plots as places on an axis, learning curves, and tokens with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grail_lightning.app.benchmark.claims import in_words, number
from grail_lightning.app.benchmark.result import Result
from grail_lightning.app.benchmark.tables import NOTHING, Forest, Section, Table, interval
from grail_lightning.app.results.table import plain
from grail_lightning.app.views.curves import Point, drawn
from grail_lightning.app.views.heatmap import shade_of

_INSET = 4.0  # Per cent of a picture's width on each side, for dots at the ends of the axis.
_APART = 25.0  # Per cent of the width between two numbers of an axis.
_CURVES_WIDTH = 520  # So that text can be read on a phone.
_KINDS = ("slip", "misconception", "bad turn", "inherited", "sound", "filler")
_MOST_TOKENS = 600  # Of a rollout.
_MOST_CHARACTERS = 120_000  # Of all rollouts, so that the page stays below 1 MB.


def forest_picture(forest: Forest) -> dict[str, Any]:
    """The rows of a forest plot with their places in per cent of its width, its neutral line and its ticks."""
    from matplotlib.ticker import MaxNLocator

    estimates = [row.estimate for row in forest.rows]
    low, high = forest.limits or (
        min(forest.neutral, *(e.low for e in estimates)),
        max(forest.neutral, *(e.high for e in estimates)),
    )
    if high <= low:
        low, high = low - 0.1, high + 0.1
    ticks = forest.limits or [float(tick) for tick in MaxNLocator(3).tick_values(low, high)]
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def place(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low)
        return round(_INSET + share * (100 - 2 * _INSET), 2)

    rows = [
        {
            "label": row.label,
            "kind": row.kind,
            "said": interval(row.estimate, forest.digits),
            "at": place(row.estimate.value),
            "low": place(row.estimate.low),
            "high": place(row.estimate.high),
        }
        for row in forest.rows
    ]
    ends = {ticks[0]: "start", ticks[-1]: "end"}
    apart = {tick: anchor for tick, anchor in ends.items() if abs(place(tick) - place(forest.neutral)) > _APART}
    anchors = {forest.neutral: ends.get(forest.neutral, "middle")} | apart
    digits = 1 if all(math.isclose(10 * tick, round(10 * tick), abs_tol=1e-9) for tick in anchors) else 2
    return {
        "title": forest.title,
        "world": forest.world,
        "neutral": place(forest.neutral),
        "rows": rows,
        "ticks": [(place(tick), number(tick, digits), anchor) for tick, anchor in anchors.items()],
    }


def curves_pictures(section: Section, seeds: Mapping[str, int]) -> list[dict[str, Any]]:
    """The learning curves of each world, and the same as a table."""
    pictures = []
    for world, curves in section.curves.items():
        points = {
            name: [
                Point(step, mean, _or_nan(low), _or_nan(high), seeds.get(world, 0))
                for step, mean, low, high in zip(*(curve[key] for key in ("steps", "mean", "low", "high")), strict=True)
            ]
            for name, curve in curves.items()
        }
        pictures.append(
            {
                "world": in_words(world),
                "figure": f"Accuracy in {in_words(world)}",
                "drawn": drawn(points, _CURVES_WIDTH),
                "table": curves_table(in_words(world), points),
            }
        )
    return pictures


def curves_table(world: str, points: Mapping[str, Sequence[Point]]) -> Table:
    """The points of learning curves, with a row for each step."""
    steps = sorted({point.step for curve in points.values() for point in curve})
    said = {(name, p.step): _accuracy(p) for name, curve in points.items() for p in curve}
    rows = [[f"{step:g}", *(said.get((name, step), NOTHING) for name in points)] for step in steps]
    return Table(title=f"Accuracy in training: {world}", columns=["step", *points], rows=rows)


def _accuracy(point: Point) -> str:
    limits = f" [{point.low:.3f}, {point.high:.3f}]" if math.isfinite(point.low) else ""
    return f"{point.value:.3f}{limits}"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


# --- rollouts -----------------------------------------------------------------------------------------------------


def rollouts(result: Result) -> list[dict[str, Any]]:
    """The examples with what is drawn of each token, and a table of their steps; long ones are cut."""
    shown = []
    left = _MOST_CHARACTERS
    for number_of, example in enumerate(result.get("examples") or [], 1):
        tokens = [str(token) for token in example["tokens"]]
        size = len(str(example["prompt"])) + sum(map(len, tokens))
        if size > left:
            break
        left -= size
        kinds = _kinds(example)
        weights = example["weights"]
        drawn_tokens = [
            _token(seen(token), weight, kind)
            for token, weight, kind in zip(tokens[:_MOST_TOKENS], weights, kinds, strict=False)
        ]
        shown.append(
            {
                "title": f"{number_of}. {in_words(plain(example['world']))}, {plain(example['outcome'])}",
                "prompt": seen(str(example["prompt"])).replace("↵", ""),
                "tokens": drawn_tokens,
                "left_out": max(0, len(tokens) - _MOST_TOKENS),
                "table": steps_table(example, f"Rollout {number_of}: its steps"),
            }
        )
    return shown


def _token(text: str, weight: float | None, kind: str | None) -> dict[str, Any]:
    """What is drawn of a token. A last line break stands outside of its box, which would begin the next line."""
    return {
        "text": text.removesuffix("\n"),
        "ends": text.endswith("\n"),
        "classes": _classes(weight, kind),
        "said": _said(weight, kind),
    }


def steps_table(example: Mapping[str, Any], title: str) -> Table:
    """The labelled steps of a rollout, with the mean and the largest weight of their tokens."""
    rows = []
    for step in example["steps"]:
        weights = [weight for weight in example["weights"][step["start"] : step["stop"]] if weight is not None]
        text = "".join(map(str, example["tokens"][step["start"] : step["stop"]]))
        mean = number(sum(weights) / len(weights)) if weights else NOTHING
        rows.append(
            [
                plain(text.strip()) or "(nothing)",
                plain(step["kind"]),
                mean,
                number(max(weights)) if weights else NOTHING,
            ]
        )
    return Table(title=title, columns=["step", "label", "mean weight", "largest"], rows=rows)


def _kinds(example: Mapping[str, Any]) -> list[str | None]:
    kinds: list[str | None] = [None] * len(example["tokens"])
    for step in example["steps"]:
        if step["kind"] in _KINDS:
            kinds[step["start"] : step["stop"]] = [step["kind"]] * (step["stop"] - step["start"])
    return kinds


def _classes(weight: float | None, kind: str | None) -> str:
    """The classes of a token: the colour of its weight in steps of 5 per cent, and the label of its step."""
    classes = ["t", *([kind.replace(" ", "-")] if kind else [])]
    if weight is None:
        return " ".join([*classes, "told"])
    shade = shade_of(weight)
    part = round(20 * abs(shade)) * 5
    return " ".join([*classes, *(["more" if shade > 0 else "less", f"p{part}"] if part else [])])


def _said(weight: float | None, kind: str | None) -> str:
    weighed = "not sampled" if weight is None else f"weight {weight:.3g}"
    return f"{weighed}, {kind}" if kind else weighed


def seen(text: str) -> str:
    """The text with signs for control characters, and one before each line break."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda found: chr(0x2400 + ord(found[0])), text)
    return text.replace("\n", "↵\n")
