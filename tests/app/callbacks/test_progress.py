"""The progress bar on a terminal, where it shares the screen with what a run prints."""

import logging
import subprocess
import sys
import warnings

import pytest
from lightning.pytorch import LightningModule, Trainer

from grail_lightning.app.callbacks.progress import BatchProgressBar
from tests.shell import SHORT

NOTES = """
import logging
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

class Notes(Callback):
    def on_train_batch_end(self, trainer, *_):
        rank_zero_info(f"NOTE in training {trainer.global_step}")
        rank_zero_warn(f"NOTE as a warning {trainer.global_step}")

    def on_validation_batch_end(self, trainer, *_):
        rank_zero_info(f"NOTE in validation {trainer.global_step}")

    def on_train_end(self, *_):
        raise OSError(28, "NOTE at the end")
"""


@pytest.mark.slow
def test_notes_warnings_and_errors_begin_on_a_line_of_their_own_beside_the_bar(tmp_path):
    (tmp_path / "notes.py").write_text(NOTES)
    options = [option for option in SHORT if "progress_bar" not in option]
    options += ["--trainer.callbacks+=notes.Notes", "--trainer.max_steps=4", "--responses.number=0"]
    command = [sys.executable, "-m", "grail_lightning", "fit", *options]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode()
    assert "Epoch 0:" in said, "the bar is shown"
    lines = [line for line in said.split("\n") if "NOTE" in line and "rank_zero_warn(" not in line]
    assert len(lines) == 8, "two steps with two notes each, three validations, and the error"
    for line in lines:
        # The cursor goes up from the second bar by an escape sequence; the bar is blanks when the note begins.
        note = line.rpartition("\r")[2].removeprefix("\x1b[A")
        assert note.startswith(("NOTE in", "grail-lightning: error: NOTE")) or "UserWarning: NOTE" in note, line
        assert "it/s" not in note


def test_loggers_and_warnings_are_as_before_when_the_bar_is_gone(monkeypatch):
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("of_a_test")
    monkeypatch.setattr(logger, "handlers", [handler])
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    shown, bar = warnings.showwarning, BatchProgressBar()
    for end in (bar.teardown, bar.on_exception):
        bar.setup(trainer, LightningModule(), "fit")
        assert (logger.handlers != [handler], warnings.showwarning is shown) == (True, False)
        end(trainer, LightningModule(), "fit")
        assert (logger.handlers, warnings.showwarning) == ([handler], shown)
