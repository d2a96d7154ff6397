"""A test that Ctrl-C ends says what is kept and how to go on, and has the exit code of an interrupted process."""

import signal
from pathlib import Path

import pytest

from grail_lightning.evaluate import read_samples
from tests.shell import SHORT, main

TEST = ["test", *SHORT, "--data.eval_prompts_per_batch=4", "--trainer.callbacks+=tests.evaluate.tested.Interrupts"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores the signal from then on.
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("kept", ["test", "none"])
def test_an_interrupted_test_says_that_its_samples_are_kept_if_they_are(kept, caplog):
    with pytest.raises(SystemExit) as stop:
        main([*TEST, f"--evaluation.keep_samples={kept}"])
    assert stop.value.code == 130
    folder = Path("runs/quickstart/test/samples")
    assert (f"are kept in {folder}; the same command goes on with them." in caplog.text) == (kept == "test")
    assert len(list(read_samples(folder))) == 4 if kept == "test" else not folder.exists()
