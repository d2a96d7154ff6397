"""A picture of the token weights of a batch: their distribution, and where in a response they are large.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grail_lightning.views.agg import new_figure, pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 20
# Okabe and Ito's blue and vermillion, told apart by all; the line tells them apart without colour.
_STYLES = {"right": ("#0072B2", "solid"), "wrong": ("#D55E00", "dashed")}


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
    found = np.full((3, _BINS), np.nan)
    for part, values in enumerate(np.split(weights[mask][order], cuts)):
        if len(values):
            found[:, part] = values.mean(), *np.quantile(values, (0.1, 0.9))
    return Profile((np.arange(_BINS) + 0.5) / _BINS, *found)


def weight_curves(
    weights: NDArray[np.float32], mask: NDArray[np.bool_], correct: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """The picture, ``[height, width, 3]``: weight against relative position, and the distribution of the weights.

    Right and wrong rollouts have a curve each; the bands reach from the 10 % to the 90 % quantile of the tokens.

    Args:
        weights: ``[B, T]``, the token weights.
        mask: ``[B, T]`` bool, the valid response tokens.
        correct: ``[B]`` bool.
    """
    figure = new_figure(960, 340)
    along, spread = figure.add_axes((0.06, 0.15, 0.5, 0.76)), figure.add_axes((0.665, 0.15, 0.32, 0.76))
    finite = np.isfinite(weights) & mask
    edges = _edges(weights[finite])
    for name, rows in (("right", correct), ("wrong", ~correct)):
        inside = finite & rows[:, None]
        if inside.any():
            _draw(along, spread, name, profile(weights, inside), weights[inside], edges, int(rows.sum()))
    along.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    along.set(xlim=(0, 1), xlabel="relative position in the response", ylabel="weight", title="weight by position")
    spread.set(xlabel="weight", ylabel="share of the tokens", title="distribution", yscale="log", ylim=(1e-4, 1.5))
    # Plain labels: those of a logarithmic axis are mathematics, which takes longer than all the rest.
    spread.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1], labels=["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
    spread.minorticks_off()
    along.legend(frameon=False, loc="upper left")
    for axes in (along, spread):
        axes.spines[["top", "right"]].set_visible(False)
    return pixels(figure)


def _draw(
    along: Axes,
    spread: Axes,
    name: str,
    found: Profile,
    values: NDArray[np.float32],
    edges: NDArray[np.float64],
    number: int,
) -> None:
    colour, style = _STYLES[name]
    along.fill_between(found.position, found.low, found.high, color=colour, alpha=0.15, linewidth=0)
    along.plot(found.position, found.mean, color=colour, linestyle=style, label=f"{name} ({number})")
    shares = np.histogram(values, edges)[0] / len(values)
    spread.stairs(shares, edges, color=colour, linestyle=style, baseline=None)


def _edges(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """The edges of a histogram's bins."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low, high = min(low, 0.0), max(high, 1.0)
    return np.linspace(low, high + 1e-6 * (high - low), 41)
