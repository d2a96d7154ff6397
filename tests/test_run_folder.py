"""A run has one folder, and nothing of anybody else's is moved or written over."""

import copy
import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger

from grail_lightning import LastCheckpoint
from grail_lightning.app.cli.trainer_options import StageCSVLogger, log_beside_training
from grail_lightning.core.runtime.files import LOCK, held
from grail_lightning.core.runtime.run_folder import MARKER, RunFolder
from tests.runs import trainer
from tests.shell import RUN, SHORT, fails, main

pytestmark = pytest.mark.usefixtures("empty_folder")


class Remote(Logger):
    """Keeps its figures elsewhere, as those of Weights & Biases and MLflow do; a folder is only where to put files."""

    def __init__(self, save_dir, name):
        super().__init__()
        self._save_dir, self._name = save_dir, name

    save_dir = property(lambda self: self._save_dir)
    name = property(lambda self: self._name)
    version = property(lambda self: "a1b2c3")
    log_metrics = log_hyperparams = None


class Board(TensorBoardLogger):
    """A logger of the user's."""


def _folder(**options):
    return RunFolder(trainer(1, **options))


def _contents(folder):
    files = [file for file in sorted(Path(folder).rglob("*")) if file.is_file() and file.name != LOCK]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _project(folder):
    """A folder of the user's, with files named as a run names its own."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("my: own")
    (folder / "checkpoints" / "last.ckpt").write_text("mine")
    (folder / "thesis.tex").write_text("years of work")
    return _contents(folder)


BOARD = {"save_dir": "runs", "name": "quick"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logger": False}, "runs/unnamed"),
        ({"logger": False, "default_root_dir": "out"}, "out"),
        ({"logger": DummyLogger()}, "runs/unnamed"),
        ({"logger": TensorBoardLogger(**BOARD, version=3)}, "runs/quick/version_3"),
        ({"logger": TensorBoardLogger(**BOARD, version="", sub_dir="events")}, "runs/quick"),
        ({"logger": TensorBoardLogger("$HERE/runs", name="quick", version="")}, "/here/runs/quick"),
        ({"logger": Remote("runs", "project")}, "runs/project"),
        ({"logger": Remote(None, None), "default_root_dir": "out"}, "out/Remote"),
        ({"logger": [Remote("runs", "project"), CSVLogger("runs", name="quick", version="")]}, "runs/quick"),
    ],
)
def test_a_run_has_one_folder_whatever_its_loggers(options, expected, monkeypatch):
    monkeypatch.setenv("HERE", "/here")
    assert _folder(**options).path.resolve() == Path(expected).resolve()


@pytest.mark.parametrize("options", [{"logger": False}, {"logger": Remote(".", "project")}])
def test_a_project_around_the_runs_stays_where_it_is(options, tmp_path):
    before = _project(tmp_path)
    for _ in range(2):
        with _folder(**options).taken():
            (_folder(**options).path / "config.yaml").write_text("a run's")
    assert before.items() <= _contents(tmp_path).items()
    assert (_folder(**options).path.parent / f"{_folder(**options).path.name}.1" / "config.yaml").is_file()


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints", "metrics.csv"])
def test_a_folder_that_may_be_the_users_is_refused_and_left_alone(name):
    Path("out", name).mkdir(parents=True)
    folder = _folder(logger=False, default_root_dir="out")
    message = rf"must be new or an earlier run's, but out holds {name} and no {MARKER}.*`trainer.default_root_dir`"
    with pytest.raises(ValueError, match=message), folder.taken():
        pass
    with pytest.raises(ValueError, match=message), folder.taken("other/last.ckpt"):
        pass
    assert os.listdir() == ["out"]
    assert os.listdir("out") == [name]


def test_a_folder_with_other_files_of_the_user_is_used_but_never_moved():
    Path("out").mkdir()
    Path("out", "slurm.log").write_text("mine")
    folder = _folder(logger=False, default_root_dir="out")
    with folder.taken():
        Path("out", "config.yaml").write_text("a run's")
    with pytest.raises(ValueError, match=r"out holds config\.yaml and no"), folder.taken():
        pass
    assert _contents(".") == {"out/slurm.log": b"mine", "out/config.yaml": b"a run's"}


def test_a_run_of_an_older_version_can_go_on_and_moves_aside_once_it_is_marked():
    before = _project(Path("out"))
    folder = _folder(logger=False, default_root_dir="out")
    with folder.taken("out/checkpoints/last.ckpt"):
        pass
    assert _contents("out") == before
    with pytest.raises(ValueError, match=f"`touch out/{MARKER}`"), folder.taken():
        pass
    Path("out", MARKER).touch()
    with folder.taken():
        pass
    assert _contents("out.1") == before | {MARKER: b""}
    assert _contents("out").keys() == {MARKER}


def test_a_checkpoint_that_is_a_link_or_a_callbacks_is_the_runs_own_and_those_of_others_move_the_run_aside():
    others = ["runs/b/checkpoints/last.ckpt", "other/checkpoints/last.ckpt", "copy/mine.ckpt"]
    for file in ("disk/last.ckpt", *others):
        Path(file).parent.mkdir(parents=True)
        Path(file).touch()
    Path("out/checkpoints").mkdir(parents=True)
    Path("out/checkpoints/last.ckpt").symlink_to(Path("disk/last.ckpt").absolute())
    for name in ("out", "other"):
        Path(name, MARKER).touch()
    callbacks = ModelCheckpoint(dirpath="runs"), LastCheckpoint(folder="disk")
    folder = RunFolder(trainer(1, *callbacks, logger=False, default_root_dir="out", enable_checkpointing=True))
    for own in ("out/checkpoints/last.ckpt", "disk/last.ckpt"):
        with folder.taken(own):
            assert Path("out", "checkpoints").exists(), own
    for number, other in enumerate(others, start=1):
        with folder.taken(other):
            assert not Path("out", "checkpoints").exists(), other
            Path("out", "checkpoints").mkdir()
        assert Path(f"out.{number}", "checkpoints").is_dir()


def test_what_was_written_by_an_evaluation_alone_is_no_earlier_run():
    folder = _folder(logger=False, default_root_dir="out")
    with folder.shared():
        Path("out", "config_validate.yaml").touch()
    with folder.taken():
        pass
    assert os.listdir() == ["out"]
    assert _contents("out").keys() == {MARKER, "config_validate.yaml"}


CSV = ["--trainer.logger=CSVLogger", *(f"--trainer.logger.{o}" for o in ("save_dir=runs", "name=quick", "version="))]
BESIDE = "{class_path: CSVLogger, init_args: {save_dir: tables, name: quick, version: ''}}"
BRIEF = [*SHORT, "--data.num_val=2", "--data.num_test=2", "--data.prompts_per_batch=2"]
BRIEF += ["--model.sampling.max_response_length=8", "--evaluation.sampling.max_response_length=8"]
TOO_LONG = "--evaluation.sampling.max_response_length=100000"  # Found when Lightning calls the checks.
LAST = "--ckpt_path=last"


@pytest.mark.slow
def test_a_run_that_is_refused_changes_nothing_of_an_earlier_one(capsys):
    options = [*BRIEF, f"--trainer.logger+={BESIDE}"]
    main(["fit", *options, "--trainer.max_steps=1"])
    before = _contents(".")
    assert "tables/quick/metrics.csv" in before
    with held(RUN):
        for more in ([], [LAST]):
            said = fails(capsys, "fit", *options, *more)
            assert f"runs/quickstart is in use by another fit (process {os.getpid()} on " in said
        main(["validate", *options, "--ckpt_path=best"])
    assert "positions" in fails(capsys, "fit", *options, LAST, TOO_LONG)
    assert before.items() <= _contents(".").items()
    assert os.listdir("runs") == ["quickstart"]
    # One that fails before its first step has moved it aside.
    Path("typo.jsonl").write_text('{"problem": [5]}')
    assert "typo.jsonl, line 1" in fails(capsys, "fit", *options, "--data=MathData", "--data.train=typo.jsonl")
    assert before.items() <= _contents(".").items()
    assert os.listdir("runs") == ["quickstart"]
    main(["validate", *options, LAST])  # What an evaluation leaves is the config that was given.
    names = ("config_validate.1.yaml", "config_validate.yaml")
    configs = [yaml.safe_load((RUN / name).read_text()) for name in names]
    assert [Path(config.pop("ckpt_path")).name for config in configs] == ["best", "last"]
    assert configs[0] == configs[1]
    assert configs[0]["trainer"]["logger"] == yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["logger"]


def test_a_run_without_a_logger_keeps_everything_in_a_folder_of_its_own(tmp_path):
    before = _project(tmp_path)
    main(["fit", *BRIEF, "--trainer.logger=false", "--trainer.max_steps=1"])
    main(["predict", *BRIEF, "--trainer.logger=false", "--ckpt_path=best"])
    after = [str(f.relative_to("runs/unnamed")) for f in Path("runs/unnamed").rglob("*") if f.is_file()]
    wanted = {"config.yaml", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "predictions.parquet", MARKER}
    assert wanted <= set(after)
    assert {*before, "runs"} == {*os.listdir(), "checkpoints/last.ckpt"} - {"checkpoints"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")  # `keep_tables` kept them
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")  # that is what resuming means
def test_tables_of_figures_outlive_an_evaluation_and_a_resume():
    main(["fit", *SHORT, *CSV])
    trained = Path("runs/quick/metrics.csv").read_text()
    for checkpoint in ("last", "best"):
        main(["validate", *SHORT, *CSV, f"--ckpt_path={checkpoint}"])
    assert Path("runs/quick/metrics.csv").read_text() == trained
    assert sorted(p.name for p in Path("runs/quick/validate").glob("*.csv")) == ["metrics.1.csv", "metrics.csv"]
    main(["fit", *SHORT, *CSV, "--trainer.max_steps=4", "--ckpt_path=last"])
    assert Path("runs/quick/metrics.1.csv").read_text() == trained
    with Path("runs/quick/metrics.csv").open() as file:
        assert {int(row["step"]) for row in csv.DictReader(file)} == {3, 4}


def test_an_evaluation_logs_to_a_part_of_the_runs_folder():
    options = {"save_dir": "runs", "name": "quick", "version": ""}
    loggers = [
        Namespace(class_path=f"lightning.pytorch.loggers.{name}", init_args=Namespace(**options))
        for name in ("TensorBoardLogger", "CSVLogger", "MLFlowLogger")
    ]
    loggers.append(Namespace(class_path=f"{__name__}.Board", init_args=Namespace(**options)))
    given = copy.deepcopy(loggers)
    changed = log_beside_training(loggers, "validate")
    board, table, remote, own = (logger.init_args for logger in changed)
    for ours in (TensorBoardLogger(**board), StageCSVLogger(**table), Board(**own)):
        assert ours.log_dir == "runs/quick/validate"
        assert _folder(logger=ours).path == Path("runs/quick")
    assert changed[1].class_path.endswith("StageCSVLogger")
    assert "sub_dir" not in remote
    assert loggers == given


@pytest.mark.slow
def test_two_ranks_are_one_holder_and_move_a_run_aside_once():
    command = [sys.executable, "-m", "grail_lightning", "fit", *SHORT, "--trainer.max_steps=1"]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--trainer.devices=2", "--trainer.strategy=ddp"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(os.listdir("runs")) == ["quickstart", "quickstart.1"]
    assert all(Path("runs", name, MARKER).is_file() for name in os.listdir("runs"))


HOLDS = """
import pathlib, sys, time
from grail_lightning.core.runtime.files import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_refused_while_another_process_lives_and_free_when_it_was_killed(tmp_path):
    folder = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        message = rf"run is in use by another fit \(process {other.pid} on .*`trainer\."
        with pytest.raises(ValueError, match=message), held(folder):
            pass
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    with held(folder):
        pass
