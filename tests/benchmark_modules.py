"""Modules of the folder benchmarks/, whose statistics are tested like those of the package."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name):
    """The module of that name. It imports its neighbours by their names alone, as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)
