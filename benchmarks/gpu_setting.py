"""What the parts of gpu_check.py have in common: the device, the models and the rows."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from stand_in import SHAPES, StandInTask, random_qwen3

from grail_lightning.policy import Loading, Policy

GIB = 2**30
GROUP = 4
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "4090": 165, "B200": 2250}


class Check:
    """The options of a part, and the rows that it writes.

    Args:
        options: The command line.

    Attributes:
        small: Whether this is a trial on a CPU.
        peak: The device's products in bfloat16, 10¹² operations a second; None if not known.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device, self.small = options, torch.device(options.device), options.device == "cpu"
        name = "" if self.small else torch.cuda.get_device_name()
        known = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
        self.peak = options.peak_tflops or known
        self.length = 64 if self.small else 2048
        self.budget = GROUP * (self.length + 52)
        self.title = f"Qwen3-{options.model}" if options.model in ("0.6b", "4b") else options.model

    def row(self, what: str, measured: float | str | None, unit: str = "") -> None:
        """Write a figure. A later one of the same name takes its place."""
        entry = {"what": what, "measured": measured, "unit": unit}
        with open(self.options.out, "a") as file:
            file.write(json.dumps(vars(self.options)["key"] | entry) + "\n")

    def policy(self) -> Policy:
        """Random weights in bfloat16 on the device; those of 4 billion parameters with checkpointed blocks."""
        with self.device:
            policy = random_qwen3(**SHAPES[self.options.model]).to(torch.bfloat16)
        policy.loading = Loading(gradient_checkpointing=self.options.model == "4b", dtype="bfloat16")
        if policy.loading.gradient_checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})
        torch.cuda.empty_cache()  # They were made in float32.
        return policy.train()

    @property
    def optimizer(self) -> partial:
        return partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0, fused=not self.small)

    def now(self) -> float:
        """Seconds, when the device has done what it was asked to do."""
        if not self.small:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def peak_of(self, found: dict[str, float], name: str) -> Iterator[None]:
        """Keep the most memory that PyTorch has allocated inside, in GiB; nothing on a CPU."""
        if self.small:
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        found[name] = max(found.get(name, 0.0), torch.cuda.max_memory_allocated() / GIB)


def prompts_of(number: int) -> list:
    return [StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in range(10, 10 + number)]


@contextmanager
def endless(policy: Policy) -> Iterator[None]:
    """Inside the context every response has the full length."""
    ends, policy.end_token_ids = policy.end_token_ids, ()
    try:
        yield
    finally:
        policy.end_token_ids = ends
