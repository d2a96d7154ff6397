"""A picture of the token weights of a batch: where in a response they are large.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """The picture, ``[height, width, 3]``: weight against relative position, of right and of wrong rollouts.

    The bands reach from the 10 % to the 90 % quantile of the tokens.

    Args:
        weights: ``[B, T]``, the token weights.
        mask: ``[B, T]`` bool, the valid response tokens.
        correct: ``[B]`` bool.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no backend to choose, and no figure that stays in memory. Few pixels an inch would make the text
    # small beside the curves, and TensorBoard shows pictures at less than half of their width.
    figure = Figure(figsize=(4, 3), dpi=200, facecolor="white")
    axes = figure.add_axes((0.13, 0.15, 0.84, 0.82))
    finite = np.isfinite(weights) & mask
    for name, rows in (("right", correct), ("wrong", ~correct)):
        inside = finite & rows[:, None]
        if inside.any():
            found, (colour, style) = profile(weights, inside), _STYLES[name]
            axes.fill_between(found.position, found.low, found.high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(found.position, found.mean, color=colour, linestyle=style, label=f"{name} ({rows.sum()})")
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set(xlim=(0, 1), xlabel="relative position in the response", ylabel="weight")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
