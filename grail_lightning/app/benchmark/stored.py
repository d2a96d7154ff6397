"""The arrays of a world's file.

Each array has the batch as its first dimension: ``N`` batches, ``B`` rows, ``W`` columns, ``K`` turns, ``S`` steps.

==============  ====================  ==================================================================================
name            shape, dtype          content
==============  ====================  ==================================================================================
``ids``         [N, B, W] int16       tokens after the prompt; a picture's tokens have the id of their place
``turn``        [N, B, W] int8        the number of the turn in which a token was sampled, −1 for others; with turns
``end``         [N, B] int8           why the rollout ended, an index of `EndReason`; with turns
``rewards``     [N, B] float16        the rewards
``verdict``     [N, B] int16          an index of the array ``verdicts`` of JSON texts, without a batch
``steps``       [N, B, S, 7] int16    labels: `Step`'s start, stop, index of `StepKind`, start and stop of the result
                                      (−1 for none), first token and the one behind the last (0, 0 for none)
``num_steps``   [N, B] int8           the number of steps; −1 where the task cannot label
``score``       [N, B, K] float16     labels: the environment's score of each turn, NaN for none; with turns
``value``       [N, B, W, 2] float16  the value of the state before each choice by resampling, in two halves; else NaN
``best``        [N, B, W, 2] float16  the baseline with the least noise there, in the same two halves
==============  ====================  ==================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

LABELS = ("steps", "num_steps", "score", "value", "best")
"""The arrays that no credit method may see."""


def read_arrays(file: Path, names: Iterable[str], number: int | None = None) -> dict[str, Any]:
    """Those of the named arrays that a file has, of its first `number` batches.

    Raises the audit event ``grail_lightning.labels`` if one of them is a label.
    """
    wanted = [*names]
    if not {*wanted}.isdisjoint(LABELS):
        sys.audit("grail_lightning.labels", file.name)
    with np.load(file) as arrays:
        return {
            name: arrays[name] if name == "verdicts" else arrays[name][:number]
            for name in wanted
            if name in arrays.files
        }


def stored_batches(file: Path) -> int:
    """The number of batches in a file."""
    with np.load(file) as arrays:
        return len(arrays["rewards"])
