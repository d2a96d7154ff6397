"""The command line. Importing the package is quick: what `--help` and `--version` print needs no torch."""

from typing import TYPE_CHECKING

from grail_lightning._lazy import lazy

if TYPE_CHECKING:
    from grail_lightning.app.cli.app import GrailCLI, main

__all__ = ["GrailCLI", "main"]


__getattr__ = lazy(__name__, dict.fromkeys(__all__, "grail_lightning.app.cli.app"))
