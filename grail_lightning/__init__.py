"""Reinforcement learning with verifiable rewards on PyTorch Lightning, with credit for each token."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from grail_lightning._version import __version__

if TYPE_CHECKING:
    from grail_lightning.callbacks import default_callbacks
    from grail_lightning.data import ArithmeticData, MathData, WordProblemData
    from grail_lightning.module import GrailModule

__all__ = ["ArithmeticData", "GrailModule", "MathData", "WordProblemData", "__version__", "default_callbacks"]

# Importing the package imports no torch: the verifier's workers, `--version` and shells stay quick (PEP 562).
_EXPORTS = {
    "GrailModule": "grail_lightning.module",
    "MathData": "grail_lightning.data",
    "ArithmeticData": "grail_lightning.data",
    "WordProblemData": "grail_lightning.data",
    "default_callbacks": "grail_lightning.callbacks",
}

# torch 2.13 deprecates `LeafSpec`, which Lightning 2.6 creates for every batch.
warnings.filterwarnings(
    "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"lightning\.pytorch\."
)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
