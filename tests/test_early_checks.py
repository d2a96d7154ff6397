"""Settings with which hours of a run would be lost are one line before a model is loaded, or in its first batches."""

import re
from pathlib import Path

import pytest
import torch

from tests.shell import SHORT, fails, fails_early, main

UNWRITABLE = "must be a folder that can be written, but got"


def stopping(metric):
    """The options of early stopping by a metric."""
    return ["--trainer.callbacks+=EarlyStopping", f"--trainer.callbacks.monitor={metric}"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


FIT = {
    "export best, none kept": (
        ["--export.which=best", "--checkpoint.save_top_k=0"],
        "`export.which` must be last .*`checkpoint.save_top_k`",
    ),
    "export best, no validation": (
        ["--export.which=best", "--trainer.limit_val_batches=0"],
        "`export.which` must be last .*no validation",
    ),
    "no room for a prompt": (
        ["--evaluation.sampling.max_response_length=99999"],
        "must leave room for a prompt in the 4096 positions",
    ),
    "automatic optimisation": (
        ["--trainer.callbacks+=GradientAccumulationScheduler", "--trainer.callbacks.scheduling={0: 2}"],
        "must leave out GradientAccumulationScheduler: it needs automatic optimisation",
    ),
    "a callback of every run": (
        ["--trainer.callbacks+=Evaluation"],
        "must leave out Evaluation, which every run has. Set `--evaluation.…`",
    ),
    "a logger's folder": (
        ["--trainer.logger.init_args.save_dir=/dev/null/x"],
        f"`trainer.logger.save_dir` {UNWRITABLE} .*Not a directory",
    ),
    "a root": (
        ["--trainer.logger=false", "--trainer.default_root_dir=/proc/x"],
        f"`trainer.default_root_dir` {UNWRITABLE}",
    ),
    "checkpoints": (["--checkpoint.dirpath=/proc/x"], f"`dirpath` of ModelCheckpoint {UNWRITABLE}"),
    "last checkpoint": (["--last_checkpoint.folder=/dev/null/x"], f"`folder` of LastCheckpoint {UNWRITABLE}"),
    "an export that is a file": (["--export.folder=afile"], f"`folder` of ExportPolicy {UNWRITABLE}"),
    "rows of another task": (
        ["--data=MathData", "--data.train=short.jsonl", "--data.task=ArithmeticTask"],
        r"must be whole numbers .*but got '1\+1\?'",
    ),
    "long prompts": (
        ["--data=MathData", "--data.train=long.jsonl"],
        r"8 of 8 prompts of long.jsonl are .* 4,052 tokens .*: line 1 \(8,022 tokens\)",
    ),
}
PREDICT = ["--predictions.file=."], r"`predictions.file` must be a file, but \. is a folder"


@pytest.mark.parametrize(
    ("subcommand", "options", "message"),
    [
        *(pytest.param("fit", *case, id=name) for name, case in FIT.items()),
        pytest.param("predict", *PREDICT, id="a folder for predictions"),
    ],
)
def test_what_a_run_would_find_out_late_is_found_before_it(subcommand, options, message, capsys):
    row = '{"problem": "1+1?", "answer": "2"}\n'
    Path("short.jsonl").write_text(row * 8)
    Path("long.jsonl").write_text(row.replace("1+1?", "1+" * 4000) * 8)
    Path("afile").touch()
    assert re.search(message, fails_early(capsys, subcommand, *SHORT, *options))


LATER = "--trainer.val_check_interval=2"  # As in a long run: Lightning has not looked yet.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--trainer.val_check_interval=99", "--trainer.check_val_every_n_epoch=1"],
            "less than or equal to the number",
        ),
        (
            ["--checkpoint.monitor=val/accuarcy"],
            r"ModelCheckpoint must .*'val/accuarcy'. Did you mean val/accuracy\?",
        ),
        (
            ["--checkpoint.monitor=val/accuarcy", "--trainer.callbacks+=ownmetrics.Measures"],
            r"Did you mean val/accuracy\?",
        ),
        (["--checkpoint.monitor=reward"], r"Did you mean train/reward\?"),
        (["--checkpoint.monitor=nothing_of_ours"], "Callbacks see .*val/accuracy, .*train/reward"),
        ([*stopping("val/accuracy"), "--trainer.limit_val_batches=0"], "`monitor` of EarlyStopping must be a metric"),
    ],
)
def test_what_lightning_finds_at_once_or_we_before_the_second_batch_is_one_line(options, message, capsys, tmp_path):
    (tmp_path / "ownmetrics.py").write_text(OWN)
    said = fails(capsys, "fit", *SHORT, LATER, "--trainer.max_steps=4", *options)
    assert re.search(message, said)
    assert not list(Path("runs/quickstart/checkpoints").glob("*")), "after one batch"


OWN = """
from lightning.pytorch import Callback

class Measures(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/accuracy_ema", 1.0)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("of_the_epoch", 1.0)
"""


@pytest.mark.parametrize("metric", ["val/accuracy_ema", "of_the_epoch"])
def test_a_metric_of_a_callback_of_ones_own_can_be_monitored(metric, tmp_path):
    (tmp_path / "ownmetrics.py").write_text(OWN)
    own = ["--trainer.callbacks+=ownmetrics.Measures", f"--checkpoint.monitor={metric}"]
    if metric == "of_the_epoch":
        own += ["--checkpoint.save_on_train_epoch_end=true", "--trainer.max_epochs=1", "--data.num_train=8"]
    main(["fit", *SHORT, LATER, *own])
    assert torch.load("runs/quickstart/checkpoints/best.ckpt", weights_only=True)["global_step"] == 2
