"""Matplotlib figures as pixels, without pyplot: no window, no backend to choose, no figure that stays in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of this size in pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 100, height / 100), dpi=100, facecolor="white")


def pixels(figure: Figure) -> NDArray[np.uint8]:
    """The drawn figure, ``[height, width, 3]``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
