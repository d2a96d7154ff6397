"""The command line. Importing the package is quick: what `--help` and `--version` print needs no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grail_lightning.app.cli.app import GrailCLI, main

__all__ = ["GrailCLI", "main"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grail_lightning.app.cli import app

    return getattr(app, name)
