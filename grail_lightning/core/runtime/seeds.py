"""Seeds for each purpose, derived from the run's one seed.

Sampling, credit and evaluation have random streams of their own, keyed by step. Switching one on or off does not change
the others, and a resumed run needs no stored random state.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SeedKey = tuple[int | str, ...]
"""What a random stream belongs to: its purpose, and numbers such as that of the optimiser steps so far."""


def run_seed() -> int:
    """The seed that `seed_everything` set, which LightningCLI calls; 0 without it."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(*keys: int | str) -> int:
    """A 63-bit seed that depends on every key."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(problem: str, sample: int) -> int:
    """The seed of a test's response: it depends on the run's seed, the problem and the number of the sample alone."""
    return derive_seed(run_seed(), "test", problem, sample)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore torch's random state on the CPU and `device` when the context ends."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Like `preserved`; inside the context the random numbers start from `seed`."""
    with preserved(device):
        torch.manual_seed(seed)
        yield
