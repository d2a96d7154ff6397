"""Files of sweeps of short runs, and what these leave."""

import json
import subprocess
from types import SimpleNamespace

import yaml

from tests.processes import Forked

OPTIONS = {
    "trainer.max_steps": 1,
    "trainer.val_check_interval": 1,
    "pictures.every_n_batches": 0,
    "model.sampling.max_response_length": 44,
    "model.execution.group_size": 4,
    "evaluation.sampling.max_response_length": 44,
    "data.num_train": 32,
    "data.num_val": 8,
    "data.num_test": 8,
    "data.prompts_per_batch": 4,
    "last_checkpoint.every_n_batches": 1,
}
METHODS = {"GRPO": {"model.credit": "Uniform"}, "wide GRAIL": {"model.credit": "GRAIL", "model.credit.std": 0.8}}


def write(place, /, options=None, **changes):
    """The file of a sweep or study: `options` are added to those of short runs, `changes` replace its keys."""
    content = {
        "config": "configs/quickstart.yaml",
        "folder": str(place / "study"),
        "options": OPTIONS | (options or {}),
        "methods": METHODS,
        "tasks": {"sums": {}},
        "seeds": [0],
    }
    file = place / "study.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in (content | changes).items() if v is not None}, sort_keys=False))
    return file


def records(file, folder="study"):
    """What is known of each run, by its folder's name."""
    return {path.parent.name: json.loads(path.read_text()) for path in (file.parent / folder).glob("*/sweep.json")}


def fork_runs(monkeypatch):
    """Let runs not import torch again."""
    monkeypatch.setattr(
        "grail_lightning.app.sweep.subprocess", SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    )
