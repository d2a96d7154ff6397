"""Modules of the folders benchmarks/ and scripts/, which are tested like those of the package."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def benchmark(name):
    """The module of benchmarks/ of that name."""
    return _module(BENCHMARKS, name)


def script(name):
    """The module of scripts/ of that name."""
    return _module(ROOT / "scripts", name)


def _module(folder, name):
    """A module of a folder. It imports its neighbours by their names alone, as a program does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module(name)
