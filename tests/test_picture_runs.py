"""Runs on prompts with pictures, and what is said of pictures that cannot be used."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grail_lightning import GrailModule, MathData
from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL, OARPerturbation
from grail_lightning.policy import Loading, LoRA
from grail_lightning.step.options import Execution, Objective
from grail_lightning.tasks.answered import MathTask
from tests.runs import Watch, trainer, weights
from tests.seeing import checkpoint, image

SAMPLING = Sampling(max_response_length=8)


def _folder(folder, number=4):
    """A table of problems with a picture each, and the pictures beside it."""
    rows = []
    for seed in range(number):
        image(seed).save(folder / f"{seed}.png")
        rows.append({"problem": f"what is 3 + {seed} ?", "answer": 3 + seed, "picture": f"{seed}.png"})
    return rows, _table(folder, rows)


def _table(folder, rows):
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _data(train, **options):
    spec = {"path": train, "images": "picture"} | options
    from grail_lightning.data.sources import DatasetSpec

    # Any answer of this policy is wrong: rows differ by their lengths.
    task = MathTask(instruction="", rewards=[short])
    return MathData(train=DatasetSpec(**spec), task=task, prompts_per_batch=2)


def short(responses, references, **columns):
    """A reward that differs between rollouts of random weights."""
    return [float(len(set(text)) % 3) for text in responses]


def _module(policy, **changes):
    options = {
        "sampling": SAMPLING,
        "execution": Execution(group_size=4),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    return GrailModule(policy, **options | changes)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("name", ["idefics3", "llava"])
def test_a_fit_on_pictures_moves_what_is_trained_and_nothing_else(name, trained, tmp_path):
    module = _module(checkpoint(name, tmp_path / "model"), loading=Loading(train_vision=trained))
    watch = Watch()
    run = trainer(2, watch)
    before = {}
    watch.on_train_start = lambda trainer, pl_module: before.update(weights(pl_module))
    run.fit(module, _data(_folder(tmp_path)[1]))
    after = weights(module)
    moved = {n for n, p in after.items() if not torch.equal(p, before[n])}
    assert len(watch.outputs) == 2
    assert any("layers" in n and "vision" not in n for n in moved)
    assert any("vision" in n for n in moved) is trained
