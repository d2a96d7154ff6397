"""The progress bar counts batches, of which each takes several optimiser steps."""

import pytest

from grail_lightning.callbacks import LastCheckpoint
from grail_lightning.callbacks.progress import BatchProgressBar
from grail_lightning.data import ArithmeticData
from tests.callbacks.scripted import Scripted, box, run

pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")


def _totals(folder, max_steps, path=None, **how):
    """The total and the number of batches of the bar, at the end of a run."""
    bar, last = BatchProgressBar(), LastCheckpoint(folder=str(folder))
    data = ArithmeticData(num_train=20, num_val=4, prompts_per_batch=2)
    options = {"enable_checkpointing": True, "enable_progress_bar": True, "limit_val_batches": 0} | how
    trainer = run(max_steps, bar, last, **options)
    trainer.fit(Scripted(lambda prompt, k, step: box("1")), datamodule=data, ckpt_path=path, weights_only=path and True)
    return bar.train_progress_bar.total, bar.train_progress_bar.n


def test_the_total_is_that_of_batches_also_after_a_resume_and_of_an_epoch(tmp_path):
    assert _totals(tmp_path, 6) == (3, 3)
    assert _totals(tmp_path, 12, tmp_path / "last.ckpt") == (6, 6)
    assert _totals(tmp_path / "other", -1, max_epochs=1) == (10, 10)
