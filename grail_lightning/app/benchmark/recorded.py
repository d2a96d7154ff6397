"""Finished training runs that the package has: those of the studies in docs/results, with uniform credit and others.

``scripts/make_training_data.py`` makes the file of them, and checks their options. A run is known by its options and
its seed. Its options are those of a world (``common``: configs, steps) and those of an arm with its point of the grid.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grail_lightning.app.choice import Row
from grail_lightning.app.results.differences import CURVE
from grail_lightning.app.results.records import flat
from grail_lightning.app.sweep import SweepRun

FILE = Path(__file__).with_name("data") / "training.json"
FIRST_BATCH = "policy/entropy_sampled"
"""A figure of the first batch of rollouts, before the first step: its value is that of data and sampling alone."""
# What a run of a world computes, but for the arm: its credit, its estimator of the advantage, and its learning rate.
_SETTINGS = re.compile(r"(model|data|evaluation)\..*|trainer\.(max_steps|val_check_interval)")
_OF_ARMS = re.compile(r"model\.(credit|control|advantage)(\..*)?|model\.optimizer\.init_args\.lr")


class Start(NamedTuple):
    """What a run of a seed shows before its first step, which is the same for all arms on one machine."""

    accuracy: float  # Held-out accuracy, at temperature 1.
    first_batch: float  # The mean entropy of the first batch of rollouts.


class Recorded(NamedTuple):
    """The recorded runs of a world."""

    settings: Mapping[str, Any]  # The resolved options that all of them have, by dotted names.
    starts: Mapping[int, Start]  # By seed.
    rows: Mapping[tuple[frozenset[str], int], Mapping[int, float]]  # Held-out accuracy, by options and seed.

    def row_of(self, run: SweepRun) -> Row | None:
        """The row of a run; None if it is not recorded."""
        curve = self.rows.get((frozenset(run.given), run.seed))
        return None if curve is None else Row(shlex.join(run.given), {CURVE: curve})

    def other_settings(self, resolved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The settings with which these runs were recorded that resolved options of ``fit`` no longer have."""
        now = settings_of(resolved)
        return {name: (value, now.get(name)) for name, value in self.settings.items() if now.get(name) != value}


def settings_of(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What resolved options of ``fit`` say of a run apart from its arm and its seed; values that are None left out."""
    options = flat(json.loads(json.dumps(resolved, default=str)))
    return {
        name: value
        for name, value in options
        if value is not None and _SETTINGS.fullmatch(name) and not _OF_ARMS.fullmatch(name)
    }


@functools.cache
def recorded(world: str) -> Recorded | None:
    """The recorded runs of a world; None if there are none."""
    content = json.loads(FILE.read_text())["worlds"].get(world)
    if content is None:
        return None
    common = frozenset(content["common"])
    return Recorded(
        content["settings"],
        {int(seed): Start(*start) for seed, start in content["starts"].items()},
        {
            (common | {*shlex.split(options)}, int(seed)): {int(step): value for step, value in curve.items()}
            for options, seeds in content["runs"].items()
            for seed, curve in seeds.items()
        },
    )


def largest_chance(problems: int, seeds: int) -> float:
    """The largest difference of two mean accuracies before training that other draws of responses explain.

    It is four standard errors of the difference of two shares of so many problems, with that many seeds each.
    """
    return 4 * math.sqrt(2 * 0.25 / problems / seeds)
