"""Settings with which a run would fail later, or be of no use, are one line before a model is loaded."""

import re
from pathlib import Path

import pytest
import torch

from tests.shell import SHORT, fails, main

UNWRITABLE = "must be a folder that can be written, but got"


def stopping(metric):
    """The options of early stopping by a metric."""
    return ["--trainer.callbacks+=EarlyStopping", f"--trainer.callbacks.monitor={metric}"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(capsys, monkeypatch, subcommand, *options):
    """The line about a mistake; no model may be loaded before it."""
    monkeypatch.setattr(
        "grail_lightning.distributed.sharding.load_policy", lambda *_, **__: pytest.fail("a model was loaded")
    )
    return fails(capsys, subcommand, *SHORT, *options)


@pytest.mark.parametrize(
    ("given", "hint"),
    {
        "val/accuarcy": r"Did you mean val/accuracy\?",
        "val/pass_at1": r"Did you mean val/pass_at_1\?",
        "val/arithmtic/accuracy": r"Did you mean val/arithmetic/accuracy\?",
        "reward_std": r"Did you mean train/reward\? .*; no other curve",
        "reward": r"It is train/reward now\.",
        "tokens_per_second": r"It is speed/tokens_per_second now\.",
        "val/pass_at_4": "Add 4 to `evaluation.pass_at`",
        "nothing_of_ours": "Callbacks see val/accuracy, .*, train/reward, ",
    }.items(),
)
def test_a_metric_that_no_run_logs_is_named_with_the_one_that_was_meant(given, hint, capsys, monkeypatch):
    said = refused(capsys, monkeypatch, "fit", f"--checkpoint.monitor={given}")
    assert re.search(f"`checkpoint.monitor` must be a metric that the run logs .*'{given}'. {hint}", said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint.filename={val/accuarcy:.2f}"], "`checkpoint.filename` must .*Did you mean val/accuracy"),
        (["--checkpoint.filename={step:zz}"], "`checkpoint.filename` must be a template .*'{step:zz}'"),
        (["--checkpoint.filename={step"], "`checkpoint.filename` must be a template .*'{step'"),
        (["--export.which=best", "--checkpoint.save_top_k=0"], "`export.which` must be last .*`checkpoint.save_top_k`"),
        (["--export.which=best", "--trainer.limit_val_batches=0"], "`export.which` must be last .*no validation"),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/accuarcy"],
            "`monitor` of ModelCheckpoint must be a metric .*Did you mean val/accuracy",
        ),
        (stopping("val_loss"), "`monitor` of EarlyStopping must .*'val_loss'. Callbacks"),
        (
            stopping("train/reward"),
            "train/reward is not measured before the first step.*`evaluation.at_start: false`",
        ),
        (
            [*stopping("val/accuracy"), "--trainer.limit_val_batches=0"],
            "`monitor` of EarlyStopping val/accuracy needs a validation, but there is none. Give `data.val`",
        ),
        (["--trainer.limit_train_batches=0"], "`trainer.limit_train_batches` must not be 0"),
        (
            ["--evaluation.sampling.max_response_length=99999"],
            "must leave room for a prompt in the 4096 positions",
        ),
    ],
)
def test_what_a_run_would_find_out_late_is_found_before_it(options, message, capsys, monkeypatch):
    assert re.search(message, refused(capsys, monkeypatch, "fit", *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["LearningRateMonitor", "--trainer.logger=false"], "`trainer.logger` must not be false with LearningRateMon"),
        (["DeviceStatsMonitor", "--trainer.logger=false"], "with DeviceStatsMonitor.*`--trainer.logger=CSVLogger`"),
        (
            [
                *("ThroughputMonitor", "--trainer.callbacks.batch_size_fn=builtins.len"),
                "--trainer.logger=false",
            ],
            "must not be false with ThroughputMonitor, which writes to loggers alone",
        ),
        (["BatchSizeFinder"], "must leave out BatchSizeFinder: .*`model.execution.token_budget`"),
        (["BackboneFinetuning"], "must leave out BackboneFinetuning: .*`model.loading.lora`"),
        (
            ["lightning.pytorch.callbacks.SpikeDetection"],
            "must leave out SpikeDetection: .*`model.execution.max_grad_nor",
        ),
        (["Evaluation"], "must leave out Evaluation, which every run has. Set its options with `--evaluation.…`"),
    ],
)
def test_a_callback_that_cannot_work_here_is_named_with_what_to_do(options, message, capsys, monkeypatch):
    said = refused(capsys, monkeypatch, "fit", f"--trainer.callbacks+={options[0]}", *options[1:])
    assert re.search(message, said)


@pytest.mark.filterwarnings("ignore:\\s*Unable to serialize instance")  # jsonargparse, about their default arguments
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=1e-3"], "it needs automatic optimisation"),
        (["ModelPruning", "--trainer.callbacks.pruning_fn=l1_unstructured"], "Prune the policy beforehand"),
    ],
)
def test_callbacks_of_automatic_optimisation_are_named(options, message, capsys, monkeypatch):
    said = refused(capsys, monkeypatch, "fit", f"--trainer.callbacks+={options[0]}", *options[1:])
    assert re.search(f"must leave out {options[0]}: .*{message}", said)


@pytest.mark.parametrize(
    ("subcommand", "options", "message"),
    [
        (
            "fit",
            ["--trainer.logger.init_args.save_dir=/proc/x"],
            "`trainer.logger.save_dir` .*No such file .*Choose ano",
        ),
        (
            "fit",
            ["--trainer.logger.init_args.save_dir=afile"],
            f"`trainer.logger.save_dir` {UNWRITABLE} .*Not a direct",
        ),
        ("fit", ["--trainer.logger.init_args.save_dir=/dev/null/x"], f"`trainer.logger.save_dir` {UNWRITABLE}"),
        ("test", ["--trainer.logger.init_args.save_dir=afile"], f"`trainer.logger.save_dir` {UNWRITABLE}"),
        ("fit", ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=/proc/x"], f"save_dir` {UNWRITABLE}"),
        (
            "fit",
            [
                "--trainer.logger=[{class_path: TensorBoardLogger, init_args: {save_dir: runs}}, "
                "{class_path: CSVLogger, init_args: {save_dir: /proc/x}}]"
            ],
            f"`save_dir` of CSVLogger {UNWRITABLE} /proc/x",
        ),
        (
            "fit",
            ["--trainer.logger=false", "--trainer.default_root_dir=/proc/x"],
            f"`trainer.default_root_dir` {UNWRITABLE}",
        ),
        ("fit", ["--checkpoint.dirpath=/proc/x"], f"`checkpoint.dirpath` {UNWRITABLE}"),
        ("fit", ["--export.folder=/dev/null/export"], f"`export.folder` {UNWRITABLE}"),
        ("fit", ["--last_checkpoint.folder=/dev/null/x"], f"`last_checkpoint.folder` {UNWRITABLE}"),
        (
            "fit",
            ["--trainer.callbacks+=KeepRollouts", "--trainer.callbacks.folder=/proc/x"],
            f"`folder` of KeepRollouts {UNWRITABLE}",
        ),
        (
            "fit",
            ["--trainer.profiler=lightning.pytorch.profilers.SimpleProfiler", "--trainer.profiler.dirpath=/proc/x"],
            f"`dirpath` of SimpleProfiler {UNWRITABLE}",
        ),
        ("predict", ["--predictions.file=/proc/x/p.parquet"], f"The folder of `predictions.file` {UNWRITABLE}"),
        ("predict", ["--predictions.file=."], r"`predictions.file` must be a file, but \. is a folder"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_its_option(subcommand, options, message, capsys, monkeypatch):
    Path("afile").touch()
    assert re.search(message, refused(capsys, monkeypatch, subcommand, *options))


def test_a_file_where_the_runs_folder_should_be_is_named(capsys, monkeypatch):
    Path("runs").mkdir()
    Path("runs/quickstart").touch()
    said = refused(capsys, monkeypatch, "fit")
    assert f"`trainer.logger.save_dir` {UNWRITABLE} runs/quickstart: Not a directory" in said


ROW = '{"problem": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (ROW.encode(), ["--data.task=ArithmeticTask"], r"must be whole numbers .*but got '1\+1\?'"),
        (
            ROW.replace("1+1?", "1+" * 4000).encode(),
            [],
            r"8 of 8 prompts of t.jsonl are .* 4,052 tokens .*: line 1 \(8,022 tokens\)",
        ),
        (None, [], "`path` t.jsonl must be a file, but it is a folder"),
    ],
)
def test_data_that_do_not_fit_the_task_or_the_model_are_named(content, options, message, capsys, monkeypatch):
    Path("t.jsonl").mkdir() if content is None else Path("t.jsonl").write_bytes(content * 8)
    said = refused(capsys, monkeypatch, "fit", "--data=MathData", "--data.train=t.jsonl", *options)
    assert re.search(message, said)


def test_a_parquet_file_that_is_none_is_named(capsys, monkeypatch):
    Path("t.parquet").write_text("garbage")
    said = refused(capsys, monkeypatch, "fit", "--data=MathData", "--data.train=t.parquet")
    assert "t.parquet must be a whole Parquet file, but got: Parquet file size is 7 bytes" in said


OWN = """
from lightning.pytorch import Callback, LightningDataModule

class Measures(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/accuracy_ema", 1.0)
        pl_module.log("val/pass_at_16", 1.0)

class Empty(LightningDataModule):
    pass
"""


@pytest.mark.parametrize("metric", ["val/accuracy_ema", "val/pass_at_16"])
def test_a_metric_of_a_callback_of_ones_own_can_be_monitored(metric, tmp_path):
    (tmp_path / "ownmetrics.py").write_text(OWN)
    main(["fit", *SHORT, "--trainer.callbacks+=ownmetrics.Measures", f"--checkpoint.monitor={metric}"])
    assert torch.load("runs/quickstart/checkpoints/best.ckpt", weights_only=True)["global_step"] == 2


def test_beside_a_callback_of_ones_own_a_misspelt_metric_is_still_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "ownmetrics.py").write_text(OWN)
    own = "--trainer.callbacks+=ownmetrics.Measures"
    said = refused(capsys, monkeypatch, "fit", own, "--checkpoint.monitor=val/accuarcy")
    assert "Did you mean val/accuracy?" in said


def test_a_metric_that_only_the_run_can_show_to_be_missing_is_one_line_too(capsys, tmp_path):
    (tmp_path / "ownmetrics.py").write_text(OWN)
    options = ["--trainer.callbacks+=ownmetrics.Measures", *stopping("unlike_any")]
    assert "Early stopping conditioned on metric `unlike_any`" in fails(capsys, "fit", *SHORT, *options)


def test_a_data_module_without_training_data_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "ownmetrics.py").write_text(OWN)
    said = refused(capsys, monkeypatch, "fit", "--data=ownmetrics.Empty")
    assert "`data` must have a `train_dataloader`, but Empty has none" in said
