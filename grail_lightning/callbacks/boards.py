"""What loggers take beside numbers: pictures, histograms and tables of text. Others are left alone."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from numpy.typing import NDArray

_BINS = 40


class _TakesImages(Protocol):
    """A logger with Lightning's interface for pictures, such as `WandbLogger`."""

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None: ...


class _TakesTables(Protocol):
    """A logger with Lightning's interface for tables, such as `WandbLogger`."""

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None: ...


def takes_pictures(logger: Logger) -> bool:
    """Whether `log_picture` shows a picture in this logger."""
    return isinstance(logger, TensorBoardLogger) or _takes_images(logger)


def log_picture(logger: Logger, tag: str, picture: NDArray[np.uint8], step: int) -> None:
    """Show a picture ``[height, width, 3]``, if the logger takes pictures."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(tag, picture, step, dataformats="HWC")
    elif _takes_images(logger):
        logger.log_image(tag, [picture], step=step)


def log_histogram(logger: Logger, tag: str, values: NDArray[np.float32], step: int) -> None:
    """Show the distribution of finite numbers, if the logger is TensorBoard's; `values` is ``[n]`` with n > 0."""
    if not isinstance(logger, TensorBoardLogger):
        return
    counts, edges = np.histogram(values, _BINS)  # TensorBoard's own bins would take a hundred times as long.
    exact = values.astype(np.float64)
    logger.experiment.add_histogram_raw(
        tag,
        min=float(exact.min()),
        max=float(exact.max()),
        num=len(exact),
        sum=float(exact.sum()),
        sum_squares=float(np.square(exact).sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )


def takes_tables(logger: object) -> TypeGuard[_TakesTables]:
    """Whether a logger shows tables of text."""
    return callable(getattr(logger, "log_table", None))


def _takes_images(logger: object) -> TypeGuard[_TakesImages]:
    return callable(getattr(logger, "log_image", None))
