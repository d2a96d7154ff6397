"""Settings with which hours of a run would be lost are one line before a model is loaded."""

import re
from pathlib import Path

import pytest

from tests.shell import SHORT, fails_early

UNWRITABLE = "must be a folder that can be written, but got"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


FIT = {
    "no room for a prompt": (
        ["--evaluation.sampling.max_response_length=99999"],
        "must leave room for a prompt in the 4096 positions",
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
