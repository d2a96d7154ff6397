"""`python -m grail_lightning.sweep`: the runs of a file, and sweeps of short fits in processes of their own."""

import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from grail_lightning.app.sweep import main, read_sweep
from grail_lightning.core.runtime.files import held
from tests.processes import Forked
from tests.shell import refusal
from tests.sweep_files import METHODS, fork_runs, records, write


def call(file, *arguments):
    """The exit code of a call in this process."""
    with pytest.raises(SystemExit) as end:
        main([str(file), *arguments])
    return end.value.code


@pytest.fixture
def _forked_runs(monkeypatch):
    fork_runs(monkeypatch)


def test_a_grid_is_every_method_on_every_task_with_every_seed(tmp_path):
    tasks = {"sums": {}, "long": {"data.problems.max_terms": 7}}
    runs = read_sweep(write(tmp_path, tasks=tasks, seeds=[0, 1]))
    assert [(run.seed, run.method, run.task) for run in runs] == [
        (seed, method, task) for seed in (0, 1) for method in METHODS for task in tasks
    ]
    last = runs[-1]
    assert last.folder == tmp_path / "study" / "wide_GRAIL__long__1"
    for option in ("--model.credit.std=0.8", "--data.problems.max_terms=7", "--seed_everything=1"):
        assert option in last.arguments


def test_every_point_of_a_grid_is_run_with_its_values_in_the_name(tmp_path):
    runs = read_sweep(write(tmp_path, methods={"GRPO": {}}, grid={"model.optimizer.lr": [1e-4, 2e-4]}, seeds=[0, 1]))
    assert [run.folder.name for run in runs] == [
        f"GRPO_lr={rate}__sums__{seed}" for seed in (0, 1) for rate in ("0.0001", "0.0002")
    ]
    assert "--model.optimizer.lr=0.0002" in runs[-1].arguments


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": None}, "`tasks`"),
        ({"method": {}}, "Did you mean `methods`?"),
        ({"choose": {"seeds": [100]}}, "Run: python scripts/study.py"),
        ({"seeds": [True, "a"]}, "`seeds`"),
        ({"seeds": [-1]}, "`seeds`"),
        ({"seeds": [0, 0]}, "`seeds`"),
        ({"seeds": [True]}, "`seeds`"),
        ({"tasks": {5: {}}}, "`tasks` must hold names, which are texts"),
        ({"folder": 3}, "`folder` must be the folder of the runs"),
        ({"options": {"export.folder": "runs/all"}}, "the sweep sets it"),
        ({"options": {"seed_everything": 3}}, "the sweep sets it"),
        ({"grid": {"model.credit": ["GRAIL", "LESS"]}}, "must be set once"),
        ({"methods": {"a b": {}, "a/b": {}}}, "folders of their own"),
        ({"methods": {"GRPO": "Uniform"}}, "`GRPO` must hold options with their values"),
        ({"grid": {"model.optimizer.lr": 1e-5}}, "must hold a list of values for each option"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, capsys, changes, said):
    assert said in refusal(capsys, main, str(write(tmp_path, **changes)))


def test_options_are_parsed_before_any_run_starts(tmp_path, capsys):
    file = write(tmp_path, methods={"GRPO": {}, "wrong": {"model.credit": "GRAIL", "model.credit.sdt": 1}})
    said = refusal(capsys, main, str(file))
    assert "The options of 'wrong' on 'sums': " in said
    assert "sdt" in said
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("jobs", "devices", "said"),
    [("2", 3, "`trainer.devices` of a run must be at most the number of GPUs, 2, but got 3"), ("0", 1, "`--jobs`")],
)
def test_a_sweep_that_cannot_place_one_run_says_so(jobs, devices, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    file = write(tmp_path, options={"trainer.devices": devices})
    assert said in refusal(capsys, main, str(file), f"--jobs={jobs}")


def test_a_run_of_another_sweep_is_left_alone(tmp_path, capsys):
    file = write(tmp_path, methods={"GRPO": {}})
    (run,) = read_sweep(file)
    run.write(state="started")
    before = records(file)
    with held(run.folder):
        assert call(file) == 1
        assert records(file) == before
    assert re.search(r"left alone: GRPO__sums__0: .* in use by another fit \(process ", capsys.readouterr().out)


def test_a_run_that_cannot_be_started_stops_no_other(tmp_path, capsys, monkeypatch):
    def popen(command, **how):
        raise OSError("no memory")

    monkeypatch.setattr(
        "grail_lightning.app.sweep.subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
    )
    assert call(write(tmp_path), "--jobs=1") == 1
    said = capsys.readouterr().out
    assert "left alone: GRPO__sums__0: no memory" in said
    assert "left alone: wide_GRAIL__sums__0: no memory" in said


@pytest.mark.usefixtures("_forked_runs")
def test_a_second_call_skips_what_is_finished_and_tries_again_what_failed(tmp_path, capsys):
    callbacks = [{"class_path": "tests.failing_rank.NeedsFile", "init_args": {"file": str(tmp_path / "needed")}}]
    methods = {"Here": {}, "There": {"trainer.callbacks": callbacks}}
    file = write(tmp_path, methods=methods)
    assert call(file, "--jobs=2") == 1
    before = records(file)
    assert before["Here__sums__0"]["state"] == "finished"
    assert before["Here__sums__0"]["outcome"].startswith("held-out accuracy: ")
    assert before["There__sums__0"]["state"] == "failed"
    assert str(tmp_path / "needed") in before["There__sums__0"]["outcome"]
    here = tmp_path / "study" / "Here__sums__0"
    log = (here / "fit.log").stat().st_mtime_ns
    (tmp_path / "needed").touch()
    assert call(file) == 0
    assert (here / "fit.log").stat().st_mtime_ns == log
    assert records(file)["There__sums__0"]["state"] == "finished"
    assert records(file)["Here__sums__0"] == before["Here__sums__0"]
    assert "All runs are finished." in capsys.readouterr().out
    # A sweep that was killed between the end of the run and its record.
    (here / "sweep.json").write_text(json.dumps(before["Here__sums__0"] | {"state": "started"}))
    assert call(file, "--only", "Here") == 0
    assert records(file)["Here__sums__0"] == before["Here__sums__0"]
    printed = capsys.readouterr().out
    assert before["Here__sums__0"]["outcome"] in printed
    assert "These runs (1 of 2) are finished." in printed
    changed = write(tmp_path, methods=methods, options={"trainer.max_steps": 4})
    assert "there is one with others" in refusal(capsys, main, str(changed))


def test_a_run_that_another_call_has_just_started_is_left_alone(tmp_path, capsys):
    """It takes its own lock after its imports, so that its folder looks like one of a run that was killed."""
    file = write(tmp_path, methods={"GRPO": {}})
    with held(tmp_path / "study" / ".GRPO__sums__0", "sweep"):
        assert call(file) == 1
    assert re.search("left alone: GRPO__sums__0: .* in use by another sweep", capsys.readouterr().out)
    assert not (tmp_path / "study" / "GRPO__sums__0").exists()


@pytest.mark.slow
def test_a_terminated_sweep_lets_its_runs_save_and_goes_on(tmp_path):
    file = write(tmp_path, methods={"GRPO": {}}, options={"trainer.max_steps": 500, "trainer.val_check_interval": 500})
    command = [sys.executable, "-m", "grail_lightning.sweep", str(file)]
    with (tmp_path / "said.txt").open("w") as said:
        process = Forked(command, stdout=said)
    checkpoint = tmp_path / "study" / "GRPO__sums__0" / "checkpoints" / "last.ckpt"
    until = time.monotonic() + 400  # A guard: a busy machine took longer than two minutes.
    while not checkpoint.exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.terminate()
    code, said = process.wait(200), (tmp_path / "said.txt").read_text()
    assert code == 1, said
    assert "The same command goes on." in said
    assert records(file)["GRPO__sums__0"]["state"] == "started"
    assert checkpoint.exists()


def test_a_list_has_the_command_of_each_run_and_how_far_it_is(tmp_path, capsys):
    main([str(write(tmp_path, seeds=[0, 1])), "--list", "--only", "wide*"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("grail-lightning fit --config=configs/quickstart.yaml")
        assert line.endswith("  # waiting")
