"""The default callbacks beside any flags of a Trainer."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from grail_lightning.callbacks import LastCheckpoint, ProgressBar, default_callbacks
from grail_lightning.data import ArithmeticData
from tests.runs import module

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),  # Of the second fit.
]
FLAGS = [
    {},
    {"logger": False},
    {"enable_checkpointing": False},
    {"enable_progress_bar": False},
    {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
    {"barebones": True},
    {"fast_dev_run": True},
    {"fast_dev_run": True, "enable_checkpointing": False},
    {"limit_val_batches": 0},
    {"max_epochs": 1, "max_steps": -1},
    {"max_steps": 0},
    {"max_time": "00:00:00:01", "max_steps": -1},
    {"default_root_dir": "elsewhere"},
    {"num_sanity_val_steps": 0, "val_check_interval": 1, "check_val_every_n_epoch": None},
    {"overfit_batches": 1},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_default_callbacks_go_with_any_flags(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"max_steps": 1, "max_epochs": -1, "accelerator": "cpu", "callbacks": default_callbacks()} | flags
    with warnings.catch_warnings():
        if "barebones" in flags:  # It says which methods of the module then do nothing.
            warnings.filterwarnings("ignore", message=".*barebones")
        trainer, data = pl.Trainer(**options), ArithmeticData(num_train=4, num_val=2, num_test=2, prompts_per_batch=2)
        trained = module()
        for _ in range(2):
            trainer.fit(trained, data)
        trainer.validate(trained, data, verbose=False)
        trainer.test(trained, data, verbose=False)
        trainer.predict(trained, data, return_predictions=False)
    kinds = [type(callback) for callback in trainer.callbacks]
    saves = not flags.get("barebones") and flags.get("enable_checkpointing", True)
    shows = not flags.get("barebones") and flags.get("enable_progress_bar", True)
    assert kinds.count(LastCheckpoint) == saves
    assert kinds.count(ModelCheckpoint) == (saves and flags.get("limit_val_batches", 1))
    assert kinds.count(ProgressBar) == shows
    assert not {RichProgressBar, TQDMProgressBar} & {*kinds}
    written = {file.name for file in Path().rglob("*.ckpt")}
    trains = saves and flags.get("max_steps", 1) != 0 and not flags.get("fast_dev_run")
    expected = {"last.ckpt", "best.ckpt"} if "limit_val_batches" not in flags else {"last.ckpt"}
    assert written == (expected if trains else set())
    assert len({file.parent for file in Path().rglob("*.ckpt")}) == trains, "both checkpoints are in the run's folder"
    assert not Path("checkpoints").exists()


def test_callbacks_that_a_user_adds_stay(tmp_path):
    own = ModelCheckpoint(dirpath=tmp_path / "own", every_n_epochs=1, save_top_k=-1)
    options = {"max_steps": 1, "max_epochs": -1, "accelerator": "cpu", "logger": CSVLogger(tmp_path, "run", "")}
    bar = RichProgressBar()
    trainer = pl.Trainer(callbacks=[*default_callbacks(progress_bar=False), own, bar], **options)
    trainer.fit(module(), ArithmeticData(num_train=2, num_val=2, prompts_per_batch=2))
    assert {own, bar} <= {*trainer.callbacks}
    assert len(list((tmp_path / "own").iterdir())) == 1
    assert {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
