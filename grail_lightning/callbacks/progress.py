"""The speed of a run: the progress bar, and what loggers get of tokens, seconds and memory."""

from __future__ import annotations

import logging
import math
import re
import resource
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm.contrib.logging import logging_redirect_tqdm

from grail_lightning.callbacks.hooks import output_of
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.step.outputs import tag

# The groups of what is measured on batches of training, where a bare name is clear.
_GROUP = re.compile(r"^(train|speed)/")


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with reward, accuracy and tokens per second, without the logger's version number.

    Args:
        refresh_rate: The number of batches between two updates; 0 switches the bar off.
        leave: Whether the bars of past epochs stay on the screen.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._redirected = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the bar, and print log messages above it from now on."""
        super().setup(trainer, pl_module, stage)
        self._redirected.close()
        if self.is_enabled:
            # Loggers with a console handler of their own; the others propagate to those.
            streams = (sys.stdout, sys.stderr)
            loggers = [logging.getLogger(name) for name in ("", "lightning.pytorch", "lightning.fabric")]
            loggers = [each for each in loggers if any(getattr(h, "stream", None) in streams for h in each.handlers)]
            self._redirected.enter_context(logging_redirect_tqdm(loggers))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore logging."""
        self._redirected.close()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore logging, because Lightning does not call `teardown` after an exception."""
        self._redirected.close()
        super().on_exception(trainer, pl_module, exception)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics that the bar shows, without the groups of their tags."""
        shown = super().get_metrics(trainer, pl_module)
        return {_GROUP.sub("", name): value for name, value in shown.items() if name != "v_num"}

    @property
    def total_train_batches(self) -> int | float:
        """The number of batches until `max_steps` optimiser steps; without `max_steps`, Lightning's own number."""
        total: int | float = super().total_train_batches
        execution = getattr(self.trainer.lightning_module, "execution", None)
        if execution is None or self.trainer.max_steps < 0:
            return total
        needed: int = math.ceil(self.trainer.max_steps / execution.steps_per_batch)
        return min(total, needed)


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
