"""Seconds of work that a device may still be doing."""

from __future__ import annotations

import time

import torch


def synchronised_clock(device: torch.device) -> float:
    """Seconds of a steady clock, after `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
