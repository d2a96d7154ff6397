"""TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path


def read_scalars(folder: Path, tag: str) -> dict[int, float]:
    """A scalar by step, of all event files of a folder; empty if they do not have it.

    A run that was resumed has logged some steps twice. The value that was logged last counts.

    Args:
        folder: The folder.
        tag: The scalar's tag.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 1 keeps the newest of what is not needed; 0 keeps everything.
    unused = dict.fromkeys(("tensors", "images", "audio", "histograms", "compressedHistograms"), 1)
    events = EventAccumulator(str(folder), size_guidance={**unused, "scalars": 0}).Reload()
    if tag not in events.Tags()["scalars"]:
        return {}
    return {point.step: float(point.value) for point in events.Scalars(tag)}
