"""Weights & Biases without a network. It is no dependency: `pip install wandb` to run these tests."""

import json
import random

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

from grail_lightning.callbacks import CreditPictures, Dashboard, RolloutTable, Throughput
from grail_lightning.credit import GRAIL
from grail_lightning.data import ArithmeticData
from tests.runs import module, trainer

pytest.importorskip("wandb")


@pytest.mark.filterwarnings("default")  # What wandb says of its own dependencies is not ours to mend.
def test_an_offline_run_has_pictures_tables_curves_and_hyper_parameters(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="p")
    state = random.getstate()
    run = trainer(
        2,
        *(
            Dashboard(),
            RolloutTable(every_n_batches=1),
            CreditPictures(every_n_batches=1, max_time_share=1.0),
            Throughput(),
        ),
        logger=logger,
        limit_val_batches=0,
    )
    run.fit(module(credit=GRAIL()), datamodule=ArithmeticData(num_train=16, prompts_per_batch=8))
    folder = tmp_path / "wandb"
    media = [f.relative_to(folder) for f in folder.rglob("media/**/*") if f.is_file()]
    pictures = sorted({f.name.partition("_")[0] for f in media if f.suffix == ".png"})
    assert pictures == ["rollouts", "weight"]
    assert len([f for f in media if f.suffix == ".png"]) == 4
    tables = [json.loads((folder / f).read_text()) for f in media if f.name.endswith(".table.json")]
    assert len(tables) == 2
    assert tables[0]["columns"] == ["rollout", "prompt", "response", "reference"]
    assert tables[0]["data"][0][1].startswith("Compute ")
    assert logger.experiment.config["credit"]["class"] == "GRAIL"
    assert {"train/reward", "speed/num_tokens", "credit/top10_mass"} <= dict(logger.experiment.summary).keys()
    logger.experiment.finish()
    assert random.getstate() == state
    assert torch.is_grad_enabled()
