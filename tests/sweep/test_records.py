"""What a sweep knows of its runs, and who may start one."""

import json
from dataclasses import replace

import pytest

from grail_lightning.cli.commands import DEBUG_HINT, MISTAKE
from grail_lightning.runtime.folder_lock import held
from grail_lightning.runtime.run_folder import MARKER
from grail_lightning.sweep.grid import read_study
from grail_lightning.sweep.records import (
    LOG,
    RECORD,
    Claim,
    Record,
    is_claimed,
    make_ready,
    read_log,
    read_record,
    write_record,
)
from tests.sweep.studies import write_study


@pytest.fixture
def run(tmp_path):
    """A run of a sweep."""
    return read_study(write_study(tmp_path, methods={"GRAIL": {"grid": {"model.optimizer.lr": [2e-4]}}})).runs[0]


def test_the_record_says_what_a_report_needs(run):
    assert read_record(run) == Record()
    record = Record(state="failed", seconds=1.5, attempts=2, error="ValueError: no", outcome="")
    write_record(run, record)
    assert read_record(run) == record
    content = json.loads((run.folder / RECORD).read_text())
    assert {name: content[name] for name in ("method", "task", "seed", "point")} == {
        "method": "GRAIL",
        "task": "sums",
        "seed": 0,
        "point": {"model.optimizer.lr": 2e-4},
    }
    assert sorted(file.name for file in run.folder.iterdir()) == [RECORD]


def test_the_record_of_a_run_that_chooses_says_so(tmp_path):
    grid = {"grid": {"model.optimizer.lr": [1e-4, 2e-4]}}
    runs = read_study(write_study(tmp_path, methods={"GRAIL": grid}, choose={"seeds": [9]})).runs
    for run in (runs[0], replace(runs[-1], point={"model.optimizer.lr": 1e-4})):
        write_record(run, Record(state="finished"))
    said = [json.loads((run.folder / RECORD).read_text()).get("choosing") for run in (runs[0], runs[-1])]
    assert said == [True, None]


def test_one_process_has_a_run(run):
    claim = Claim(run)
    with pytest.raises(ValueError, match="in use"):
        Claim(run)
    assert is_claimed(run)
    claim.release()
    assert not is_claimed(run)
    Claim(run).release()


def test_an_attempt_without_a_checkpoint_leaves_nothing_to_the_next(run):
    assert not make_ready(run)
    write_record(run, Record(state="interrupted", attempts=1))
    (run.folder / LOG).write_text("said\n")
    (run.folder / "config.yaml").write_text("{}")
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "best.ckpt").touch()
    assert not make_ready(run)
    assert sorted(file.name for file in run.folder.iterdir()) == sorted([LOG, MARKER, RECORD])


def test_an_attempt_with_a_checkpoint_is_gone_on_with(run):
    make_ready(run)
    write_record(run, Record(state="interrupted", attempts=1))
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "last.ckpt").touch()
    (run.folder / "events").touch()
    assert make_ready(run)
    assert (run.folder / "events").exists()


def test_a_folder_that_is_not_a_run_of_the_sweep_is_left_as_it_is(run):
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").touch()
    assert not make_ready(run)
    assert [file.name for file in run.folder.iterdir()] == ["thesis.tex"]


def test_a_folder_in_which_a_fit_is_at_work_is_not_made_ready(run):
    with held(run.folder), pytest.raises(ValueError, match="in use by another fit"):
        make_ready(run)


@pytest.mark.parametrize(
    ("text", "outcome", "error"),
    [
        ("held-out accuracy: 0.438 -> 0.881 (512 problems)\n", "0.438 -> 0.881 (512 problems)", None),
        (
            'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: no memory\nbye\n',
            "",
            "RuntimeError: no memory",
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.\n", "", "torch.cuda.OutOfMemoryError: CUDA out of memory."),
        (f"Seed set to 0\n{MISTAKE}`policy` must be. {DEBUG_HINT}\n", "", "`policy` must be."),
        (f"{MISTAKE}`a` must be 1. Take 1. {'Or ' * 90} 2. {DEBUG_HINT}\n", "", "`a` must be 1. Take 1. …"),
        ("ValueError: " + "many words " * 30, "", "ValueError: " + "many words " * 17 + "…"),
        ("Loading: 0%\rLoading: 100%\r\n\n", "", "Loading: 100%"),
        ("KeyboardInterrupt\n", "", "KeyboardInterrupt"),
        ("\udcff\x00 odd\n".encode(errors="surrogateescape").decode("latin1"), "", "ÿ\x00 odd"),
        ("", "", ""),
        ("x" * 10_000, "", "x" * 199 + "…"),
    ],
)
def test_the_last_line_of_an_error_is_found_in_the_log(run, text, outcome, error):
    run.folder.mkdir(parents=True)
    before = "ValueError: of an earlier attempt\nheld-out accuracy: 0 -> 1\n"
    (run.folder / LOG).write_text(before + text)
    found = read_log(run, len(before))
    assert found[0] == outcome
    assert error is None or found[1] == error


def test_a_log_that_is_gone_is_said_to_be(run):
    assert read_log(run, 0) == ("", f"{run.folder / LOG} has been removed")
