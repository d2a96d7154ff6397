"""The progress bar counts batches, and `max_steps` counts optimiser steps."""

import pytest

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
