"""The speed of each batch, and the progress bar, which counts batches that take several optimiser steps."""

import sys
import time

import pytest

from grail_lightning import ArithmeticData, LastCheckpoint, Throughput
from grail_lightning.app.callbacks.progress import BatchProgressBar
from tests.app.callbacks.scripted import Scripted, board, box, run, scalars

pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")


class Slow(Scripted):
    """Each batch takes at least 20 ms."""

    def __init__(self):
        super().__init__(lambda prompt, k, step: box(prompt.reference))

    def training_step(self, problems, batch_idx):
        time.sleep(0.02)
        return super().training_step(problems, batch_idx)

    def tokens(self):
        """Those of each batch: its problems have two samples each: prompt, response, end token."""
        encode, shown = self.tokenizer, [[(p.messages, box(p.reference)) for p in batch] for batch in self.seen]
        return [sum(2 * (sum(len(encode(text)["input_ids"]) for text in row) + 1) for row in rows) for rows in shown]


def _fit(folder, max_steps, throughput, path=None, **how):
    """The module of a run, and the total and the number of batches of the bar at its end."""
    module, bar, last = Slow(), BatchProgressBar(), LastCheckpoint(folder=str(folder))
    data = ArithmeticData(num_train=8, num_val=4, prompts_per_batch=2)
    options = {"enable_checkpointing": True, "enable_progress_bar": True, "limit_val_batches": 0} | how
    trainer = run(max_steps, bar, throughput, last, **options)
    trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=path and True)
    return module, bar.train_progress_bar.total, bar.train_progress_bar.n


def test_tokens_time_and_memory_of_each_batch_are_logged_and_the_bar_shows_the_speed(tmp_path, capsys):
    module, *_ = _fit(tmp_path, 4, Throughput(), logger=board(tmp_path))
    found, (first, second) = scalars(tmp_path), module.tokens()
    assert "tokens_per_" in capsys.readouterr().out
    assert found["speed/num_tokens"] == [(2, first), (4, first + second)]
    rates = zip((first, second), found["speed/step_time"], found["speed/tokens_per_second"], strict=True)
    for tokens, (_, seconds), (_, rate) in rates:
        assert 0.02 < seconds < 5
        assert abs(rate * seconds - tokens) < 1e-3 * tokens
    if sys.platform == "linux":
        # A process that has imported torch holds more than 100 MiB, and this one less than the machine has.
        with open("/proc/self/status") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
        assert 0.1 < found["speed/peak_memory_gb"][-1][1] <= resident * 1.01


def test_the_tokens_and_the_total_of_the_bar_go_on_after_a_resume_and_start_anew_in_a_new_fit(tmp_path):
    once, resumed = Throughput(), Throughput()
    module, *bar = _fit(tmp_path, 4, once)
    assert (bar, once.num_tokens) == ([2, 2], sum(module.tokens()))
    module, *bar = _fit(tmp_path, 8, resumed, tmp_path / "last.ckpt")
    assert (bar, resumed.num_tokens) == ([4, 4], once.num_tokens + sum(module.tokens()))
    module, *bar = _fit(tmp_path / "other", -1, once, max_epochs=1)
    assert (bar, once.num_tokens) == ([4, 4], sum(module.tokens()))
