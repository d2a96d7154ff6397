"""A logger that sends its figures elsewhere."""

from lightning.pytorch.loggers import CSVLogger


class Elsewhere(CSVLogger):
    """A logger of another kind, with a folder and an option of its own."""

    def __init__(self, save_dir: str, address: str) -> None:
        super().__init__(save_dir)
        self.address = address
