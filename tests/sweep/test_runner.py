"""Sweeps of real runs: short fits of the packaged policy, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from grail_lightning.sweep.command import main
from tests.sweep.studies import METHODS, write_study

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kill_sweep.py"


def call(file, *arguments):
    """The exit code of a call in this process."""
    with pytest.raises(SystemExit) as end:
        main([str(file), *arguments])
    return end.value.code


def started(file, *arguments):
    """A call in a process of its own."""
    command = [sys.executable, "-u", "-m", "grail_lightning.sweep", str(file), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(file):
    """What is known of each run, by its folder's name."""
    found = sorted((file.parent / "study").glob("*/sweep.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def processes(folder):
    """The processes that train in the folders of a sweep."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "fit" in words and any(str(folder) in word for word in words):
            found.append(int(entry.name))
    return found


def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    needed = tmp_path / "needed.txt"
    callbacks = [{"class_path": "tests.sweep.parts.NeedsFile", "init_args": {"file": str(needed)}}]
    methods = {"Here": {"model.credit": "GRAIL"}, "There": {"trainer.callbacks": callbacks}}
    file = write_study(tmp_path, methods=methods)
    assert call(file, "--jobs=2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"2 runs in {tmp_path / 'study'}, 2 at once (--jobs)"
    found = records(file)
    here, there = found["Here__sums__0"], found["There__sums__0"]
    assert (here["state"], there["state"]) == ("finished", "failed")
    assert {"method": "Here", "task": "sums", "seed": 0}.items() <= here.items()
    assert there["error"] == f"FileNotFoundError: [Errno 2] No such file or directory: '{needed}'"
    assert any(
        line.endswith(f"There, sums, seed 0: failed, see {tmp_path / 'study/There__sums__0/fit.log'}") for line in lines
    )
    assert lines[-3:-1] == [
        "1 finished, 1 failed",
        f"failed: There, sums, seed 0: {there['error']}",
    ]
    exported = tmp_path / "study" / "Here__sums__0" / "export" / "model.safetensors"
    before = exported.stat().st_mtime_ns

    needed.touch()
    assert call(file, "--jobs=1") == 0
    found = records(file)
    assert [(record["state"], record["attempts"]) for record in found.values()] == [("finished", 1), ("finished", 2)]
    assert exported.stat().st_mtime_ns == before, "a run that is finished is not run again"
    assert "8 problems, temperature 1.0" in found["There__sums__0"]["outcome"]
    log = (tmp_path / "study" / "There__sums__0" / "fit.log").read_text()
    assert log.count(", attempt ") == 2
    assert "held-out accuracy: " in log
    left = {entry.name for entry in (tmp_path / "study").iterdir() if not entry.name.startswith(".")}
    assert left == {"Here__sums__0", "There__sums__0"}


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_with_a_checkpoint_from_which_they_go_on(tmp_path):
    long = {"trainer.max_steps": 12, "trainer.val_check_interval": 100, "data.num_train": 64}
    (tmp_path / "whole").mkdir()
    whole = write_study(tmp_path / "whole", options=long, methods={"GRPO": METHODS["GRPO"]})
    assert call(whole, "--jobs=1") == 0
    file = write_study(tmp_path, options=long, methods={"GRPO": METHODS["GRPO"]})
    sweep = started(file, "--jobs=1")
    folder = tmp_path / "study" / "GRPO__sums__0"
    while not (folder / "checkpoints" / "last.ckpt").exists():
        assert sweep.poll() is None, sweep.stdout.read()
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    said = sweep.communicate()[0]
    assert sweep.returncode == 130
    assert "SIGINT: runs save and end after their batch" in said
    assert said.splitlines()[-2:] == ["0 finished, 1 not finished", "The same command goes on."]
    assert processes(tmp_path / "study") == []
    assert records(file)["GRPO__sums__0"]["state"] == "interrupted"
    assert call(file) == 0
    ours, theirs = (load_file(f.parent / "study/GRPO__sums__0/export/model.safetensors") for f in (file, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs), "as if it had not been interrupted"


@pytest.mark.slow
def test_a_sweep_that_is_killed_takes_its_runs_with_it(tmp_path):
    file = write_study(tmp_path, options={"trainer.max_steps": 500, "data.num_train": 160}, methods={"GRPO": {}})
    sweep = started(file, "--jobs=1")
    while not (tmp_path / "study" / "GRPO__sums__0" / "checkpoints" / "last.ckpt").exists():
        assert sweep.poll() is None, sweep.stdout.read()
        time.sleep(0.05)
    assert len(processes(tmp_path / "study")) == 1
    sweep.kill()
    sweep.communicate()
    end = time.monotonic() + 60
    while processes(tmp_path / "study") and time.monotonic() < end:
        time.sleep(0.1)
    assert processes(tmp_path / "study") == []


@pytest.mark.slow
def test_two_calls_at_once_share_the_runs(tmp_path):
    file = write_study(tmp_path, seeds=[0, 1])
    both = [started(file, "--jobs=1") for _ in range(2)]
    said = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    found = records(file)
    assert len(found) == 4
    assert all((record["state"], record["attempts"]) == ("finished", 1) for record in found.values())
    assert sum(text.count(": finished in ") for text in said) == 4 + sum(
        text.count(" in another call") for text in said
    )
    assert all(text.splitlines()[-1] == "4 finished" for text in said)


@pytest.mark.slow
def test_a_point_is_chosen_before_its_runs_begin(tmp_path, capsys):
    methods = {"GRPO": METHODS["GRPO"] | {"grid": {"model.optimizer.lr": [1e-4, 2e-1]}}}
    file = write_study(tmp_path, methods=methods, choose={"seeds": [9]}, seeds=[0], options={"data.num_val": 64})
    assert call(file, "--jobs=1") == 0
    said = capsys.readouterr().out
    assert "GRPO, sums: lr=0.0001 is best of the grid on the choosing seeds" in said, (
        "the other one destroys the policy"
    )
    assert said.index("is best of the grid") < said.index("GRPO, sums, seed 0 at lr=0.0001: started")
    (record,) = records(file).values()
    assert record["point"] == {"model.optimizer.lr": 1e-4}
    assert len(list((tmp_path / "study_choosing").glob("*/sweep.json"))) == 2


@pytest.mark.slow
def test_a_choice_that_a_failure_prevents_is_said_once(tmp_path, capsys):
    callbacks = [{"class_path": "tests.sweep.parts.NeedsFile", "init_args": {"file": str(tmp_path / "absent")}}]
    methods = {"GRPO": {"trainer.callbacks": callbacks, "grid": {"model.optimizer.lr": [1e-4, 2e-4]}}}
    file = write_study(tmp_path, methods=methods, choose={"seeds": [9]})
    assert call(file, "--jobs=2") == 1
    said = capsys.readouterr().out
    assert said.count("GRPO, sums: no point can be chosen, since a run that chooses has failed.") == 1
    assert said.splitlines()[-4] == "0 finished, 2 failed, 1 not finished"


@pytest.mark.slow
def test_an_array_task_of_slurm_runs_its_run_alone(tmp_path, capsys, monkeypatch):
    file = write_study(tmp_path)
    main([str(file), "--slurm-script"])
    script = tmp_path / "array.sh"
    script.write_text(capsys.readouterr().out)
    variables = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "study"}
    done = subprocess.run(
        ["bash", str(script)], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = records(file)
    assert [(name, record["state"]) for name, record in found.items()] == [("GRAIL__sums__0", "finished")]


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_random_moments_has_the_same_table():
    command = [sys.executable, str(BENCHMARK), "--kills=2", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs lost: 0, folders too many: 0, most processes in one folder: 1" in done.stdout
    assert "tables differ: False, weights differ: 0" in done.stdout
