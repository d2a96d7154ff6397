"""Classes such as users write: a logger that sends its figures elsewhere, and a callback that fails."""

from pathlib import Path

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger


class Elsewhere(CSVLogger):
    """A logger of another kind, with a folder and an option of its own."""

    def __init__(self, save_dir: str, address: str) -> None:
        super().__init__(save_dir)
        self.address = address


class NeedsFile(Callback):
    """Reads a file when training starts."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_start(self, trainer, pl_module):
        """Fail if the file is not there."""
        Path(self.file).read_text()
