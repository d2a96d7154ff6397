"""The callback that logs the speed of a run: tokens, seconds and memory of each batch."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from grail_lightning.app.callbacks.hooks import output_of
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.core.step.figures import tag


class Throughput(Callback):
    """Logs tokens, seconds and memory of each training batch, under ``speed/``.

    - ``num_tokens``: tokens of prompts and responses, with what environments answered, since the start of training,
      over all ranks; a resume keeps the count.
    - ``tokens_per_second``: the tokens of this batch divided by its `step_time`.
    - ``step_time``: seconds of the batch, sampling and grading included.
    - ``peak_memory_gb``: the largest memory use so far on any rank, in GiB, by torch on the GPU or else by the process.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._started = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the count. A resumed fit gets its count afterwards, by `load_state_dict`."""
        if stage == "fit":
            self.num_tokens = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the metrics of the batch."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        seconds = time.perf_counter() - self._started
        rollouts = output_of(outputs).batch
        tokens = all_reduce(rollouts.lengths.sum(), "sum")
        # Ranks measure different times, and the collectives within a step make all wait for the slowest.
        slowest = torch.tensor([seconds, _peak_memory(pl_module.device)], device=pl_module.device)
        seconds, peak = all_reduce(slowest, "max").tolist()
        self.num_tokens += int(tokens)
        rate = int(tokens) / max(seconds, 1e-9)
        figures = {"num_tokens": self.num_tokens, "tokens_per_second": rate}
        figures |= {"step_time": seconds, "peak_memory_gb": peak}
        for logger in trainer.loggers:
            logger.log_metrics({tag(name): value for name, value in figures.items()}, step=trainer.global_step)
        pl_module.log(tag("tokens_per_second"), float(round(rate)), prog_bar=True, logger=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The number of tokens so far."""
        return {"num_tokens": self.num_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of tokens."""
        self.num_tokens = state_dict["num_tokens"]


def _peak_memory(device: torch.device) -> float:
    """The peak memory use in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, KiB elsewhere.
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
