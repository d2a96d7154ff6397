"""The progress bar counts batches, and `max_steps` counts optimiser steps."""

import io
import logging
import warnings

import pytest
from lightning.pytorch import Callback

from grail_lightning.callbacks import ProgressBar
from tests.runs import batches, module, trainer


@pytest.mark.parametrize(("steps", "batches_needed"), [(4, 1), (5, 2), (100, 3)])
def test_the_bar_ends_where_the_run_does(steps, batches_needed):
    """2 passes of 2 mini-batches are 4 optimiser steps a batch; there are 3 batches."""
    bar = ProgressBar()
    ours = module({"updates_per_batch": 2, "mini_batches": 2})
    run = trainer(steps, bar, enable_progress_bar=True, max_epochs=1)
    totals = []
    bar.on_train_batch_end = lambda *_: totals.append(bar.total_train_batches)
    run.fit(ours, batches(3, size=2))
    assert set(totals) == {batches_needed}
    assert len(totals) == batches_needed


class Talks(Callback):
    """Says something in the middle of an epoch, in both ways; and may break off."""

    def __init__(self, breaks):
        self.breaks = breaks

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        logging.getLogger("lightning.pytorch.somewhere").info("a message")
        warnings.warn("a warning", stacklevel=1)
        if self.breaks:
            raise RuntimeError("broken off")


@pytest.mark.parametrize("breaks", [False, True])
def test_messages_stand_on_lines_of_their_own_while_the_bar_is_drawn(breaks, monkeypatch):
    console = io.StringIO()
    logger, handler = logging.getLogger("lightning.pytorch"), logging.StreamHandler(console)
    monkeypatch.setattr("sys.stdout", console)
    monkeypatch.setattr("sys.stderr", console)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(warnings, "showwarning", show := lambda message, *_: console.write(f"{message}\n"))
    run = trainer(3, ProgressBar(), Talks(breaks), enable_progress_bar=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("always", "a warning")
        try:
            run.fit(module(), batches(3, size=2))
        except RuntimeError:
            assert breaks
        assert warnings.showwarning is show, "what was redirected is given back"
    assert logger.handlers == [handler]
    text = console.getvalue()
    assert "Epoch 0" in text
    for said in ("a message\n", "a warning\n"):
        assert said in text
        for before in text.split(said)[:-1]:
            assert not before.rpartition("\n")[2].rpartition("\r")[2].strip(), "the bar was cleared"
