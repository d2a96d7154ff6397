"""An engine that fails on the second rank alone, and a callback that fails without its file."""

from pathlib import Path

import torch
from lightning.pytorch import Callback

from grail_lightning import HFEngine


class Failing(HFEngine):
    """Raises in its fourth call, except on the first rank, which goes on to the next collective."""

    calls = 0

    def generate(self, *arguments):
        self.calls += 1
        if self.calls == 4 and torch.distributed.get_rank() > 0:
            raise ValueError("this share of the batch is wrong")
        return super().generate(*arguments)


class NeedsFile(Callback):
    """Reads a file when training starts."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_start(self, trainer, pl_module):
        """Fail if the file is not there."""
        Path(self.file).read_text()
