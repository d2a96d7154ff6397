"""The splits of generated problems, and how many problems they have."""

from __future__ import annotations

from grail_lightning.data.modules import Split
from grail_lightning.tasks.arithmetic import Split as ProblemSplit

PROBLEM_SPLITS: dict[Split, ProblemSplit] = {"train": "train", "val": "validation", "test": "test", "predict": "test"}


def split_sizes(num_train: int, num_val: int, num_test: int) -> dict[Split, int]:
    """The number of problems of each split; prediction has those of the test.

    Raises:
        ValueError: If a number is not positive.
    """
    for name, number in (("num_train", num_train), ("num_val", num_val), ("num_test", num_test)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, but got {number}.")
    return {"train": num_train, "val": num_val, "test": num_test, "predict": num_test}
