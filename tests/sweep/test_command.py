"""`python -m grail_lightning.sweep` as a user meets it, as far as it runs nothing."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grail_lightning.sweep.command import main, make_parser, select
from grail_lightning.sweep.grid import read_study
from grail_lightning.sweep.plan import RunPlanner
from grail_lightning.sweep.records import Claim, Record, write_record
from tests.shell import refusal
from tests.sweep.studies import METHODS, write_study

ROOT = Path(__file__).parents[2]
GRID = {"grid": {"model.optimizer.lr": [1e-4, 2e-4]}}


def said(capsys, *arguments):
    """The lines that a call prints."""
    main([*map(str, arguments)])
    found = capsys.readouterr()
    assert found.err == ""
    return found.out.splitlines()


def fails(capsys, *arguments):
    """The one line that a user sees."""
    return refusal(capsys, main, *arguments)


def test_the_list_names_each_run_with_the_command_that_it_is(tmp_path, capsys):
    lines = said(capsys, write_study(tmp_path, seeds=[0, 1]), "--list")
    assert lines[2] == f"1  GRAIL, sums, seed 0  ({tmp_path / 'study' / 'GRAIL__sums__0'})"
    words = shlex.split(lines[3])
    assert words[:3] == ["grail-lightning", "fit", "--config=configs/quickstart.yaml"]
    assert "--model.credit=GRAIL" in words
    assert len(lines) == 2 * 4


def test_patterns_choose_runs_and_bring_those_that_choose_for_them(tmp_path, capsys):
    file = write_study(tmp_path, methods=METHODS | {"B": GRID}, seeds=[0, 1], choose={"seeds": [9]})
    names = [line for line in said(capsys, file, "--list", "--only", "GR*__0", "B") if line[0] != " "]
    assert [name.partition("  (")[0] for name in names] == [
        "0  B, sums, seed 9 at lr=0.0001",
        "1  B, sums, seed 9 at lr=0.0002",
        "2  GRPO, sums, seed 0",
        "3  GRAIL, sums, seed 0",
        "4  B, sums, seed 0",
        "7  B, sums, seed 1",
    ]


def test_the_status_of_each_run_is_read_from_its_folder(tmp_path, capsys):
    file = write_study(tmp_path, seeds=[0, 1, 2])
    runs = read_study(file).runs
    write_record(runs[0], Record(state="finished", seconds=46.2, attempts=1, outcome="0.4 -> 0.9 (8 problems)"))
    write_record(runs[1], Record(state="failed", seconds=7.0, attempts=2, error="ValueError: no"))
    write_record(runs[2], Record(state="interrupted", attempts=1))
    write_record(runs[3], Record(state="interrupted", attempts=1))
    claim = Claim(runs[3])
    lines = said(capsys, file, "--status")
    claim.release()
    assert [line.split(maxsplit=4)[4] if len(line.split()) > 4 else line for line in lines[:4]] == [
        "finished           46 s  0.4 -> 0.9 (8 problems)",
        "failed              7 s  ValueError: no",
        "interrupted",
        "running",
    ]
    assert lines[-1] == "1 finished, 1 failed, 1 interrupted, 1 running, 2 waiting"
    assert not (tmp_path / "study" / ".sweep" / runs[5].name).exists(), "looking claims nothing"


def test_the_script_for_slurm_has_a_task_for_each_run(tmp_path, capsys):
    lines = said(capsys, write_study(tmp_path, seeds=[0, 1]), "--slurm-script")
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --array=0-3" in lines
    assert not any("gpus" in line for line in lines)
    assert lines[-1].endswith('study.yaml --index "$SLURM_ARRAY_TASK_ID"')


def test_the_script_for_slurm_of_some_runs_has_their_numbers(tmp_path, capsys):
    file = write_study(
        tmp_path, methods={"A": GRID, "B": GRID, "C": {"model.credit": "Uniform"}}, seeds=[0, 1], choose={"seeds": [9]}
    )
    listed = said(capsys, file, "--list", "--only", "B", "C__sums__1")
    numbers = [int(line.split()[0]) for line in listed if line[0] != " "]
    assert numbers == [2, 3, 5, 8, 9]
    lines = said(capsys, file, "--slurm-script", "--only", "B", "C__sums__1")
    assert "#SBATCH --array=2-3,5,8-9" in lines
    assert "#   sbatch --array=2-3 SCRIPT" in lines
    assert "#   sbatch --array=5,8-9 --dependency=afterok:JOB SCRIPT" in lines


def test_the_script_for_slurm_says_how_a_choice_comes_first(tmp_path, capsys):
    file = write_study(
        tmp_path,
        options={"trainer.accelerator": "gpu", "trainer.devices": 2, "trainer.strategy": "ddp"},
        methods={"A": {}, "B": GRID},
        choose={"seeds": [8, 9]},
    )
    lines = said(capsys, file, "--slurm-script", "--output", tmp_path / "my runs")
    assert "#SBATCH --gpus=2" in lines
    assert "#   sbatch --array=0-3 SCRIPT" in lines
    assert "#   sbatch --array=4-5 --dependency=afterok:JOB SCRIPT" in lines
    assert shlex.split(lines[-1])[-4:-2] == ["--output", str(tmp_path / "my runs")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "GRIAL"], "`--only` must match the name of a run or a method (GRAIL, GRPO), but got 'GRIAL'"),
        (["--index", "4"], "`--index` must lie between 0 and 1, but got 4"),
        (
            ["--index", "0", "--only", "GRAIL"],
            "`--index` names one run of all in --list, so that `--only` must be left",
        ),
        (["--jobs", "0"], "`--jobs` must be at least 1, but got 0"),
        (["--jobs", "two"], "Argument --jobs: invalid int value: 'two'. See --help."),
        (["--list", "--status"], "not allowed with argument"),
        (["--stat"], "Unrecognized arguments: --stat"),
    ],
)
def test_a_wrong_option_of_the_command_is_one_line(tmp_path, capsys, arguments, message):
    assert message in fails(capsys, write_study(tmp_path), *arguments)


@pytest.mark.parametrize(("name", "said"), [("absent.yaml", "does not exist"), ("folder", "is a folder")])
def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys, name, said):
    (tmp_path / "folder").mkdir()
    line = fails(capsys, tmp_path / name, "--list")
    assert f"A sweep is read from a YAML file, but {tmp_path / name} {said} (looked in " in line


def test_a_run_that_waits_for_a_choice_is_no_task_of_its_own(tmp_path, capsys):
    file = write_study(tmp_path, methods={"B": GRID}, choose={"seeds": [9]})
    line = fails(capsys, file, "--index", "2")
    assert "`--index` 2 must wait for the runs that choose the point of B, sums, seed 0" in line
    assert "seed 9 at lr=0.0001 is not finished" in line


def test_a_mistake_in_the_file_is_one_line_and_nothing_is_left(tmp_path):
    file = write_study(tmp_path, methods={"A": {"model.credit": "GRIAL"}})
    command = [sys.executable, "-m", "grail_lightning.sweep", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"grail-lightning: error: {file}, A on sums: `model.credit` must be one of")
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


COMMANDS = [
    (page.name, shlex.split(arguments, comments=True))
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
    for arguments in re.findall(r"^(?:\$ )?python -m grail_lightning\.sweep (.*)$", page.read_text(), re.MULTILINE)
]


def test_the_commands_on_the_pages_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert {"README.md", "sweeps.md", "study.md"} <= {page for page, _ in COMMANDS}
    for _, words in COMMANDS:
        own = make_parser().parse_args(words[: words.index(">")] if ">" in words else words)
        study = read_study(own.file)
        assert select(study, own.only, own.index)


@pytest.mark.parametrize(
    "file",
    [*(ROOT / "docs" / "examples" / "sweeps").glob("*.yaml"), *(ROOT / "configs").glob("study*.yaml")],
    ids=lambda f: f.name,
)
def test_the_sweeps_that_come_with_the_package_are_planned(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = read_study(file)
    assert len(RunPlanner(study).plan(study.runs)) > 20


def test_a_sweep_of_the_package_is_found_from_any_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "configs/study.yaml", "--status", "--only", "GRPO__quickstart__0")[-1] == "1 waiting"
