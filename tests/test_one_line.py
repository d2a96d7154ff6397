"""The console of a real process: a mistake is its last line, and a run that begins says what it has to say."""

import json

import pytest

from tests.processes import run_script
from tests.shell import SHORT

# Runs the command in this process, once for each list of arguments, and prints the lines that reached the console.
CONSOLE = f"""
import json, os, sys
from pathlib import Path
import grail_lightning.distributed.sharding as module
from grail_lightning.__main__ import main

def load(*arguments, **options):
    Path("loaded").touch()
    return load_policy(*arguments, **options)

load_policy, module.load_policy = module.load_policy, load
before = os.dup(2)
for arguments in json.loads(sys.argv[1]):
    os.dup2(os.open("console", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv[1:] = [arguments[0], *{SHORT!r}, *arguments[1:]]
    try:
        code = main() or 0
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os.dup2(before, 2)
    lines = [line for line in Path("console").read_text().splitlines() if line.strip()]
    print(json.dumps([code, lines, Path("loaded").exists()]), flush=True)
"""


@pytest.fixture
def console(tmp_path, monkeypatch):
    """A function from lists of arguments to exit code, lines on the console, and whether a model was loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "console.py").write_text(CONSOLE)
    (tmp_path / "train.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n' * 8)
    (tmp_path / "cut.jsonl").write_text('{"problem": "1+1?"\n')
    (tmp_path / "text.ckpt").write_text("hello")

    def run(*commands):
        (printed,) = run_script(tmp_path / "console.py", json.dumps(commands))
        return [json.loads(line) for line in printed.stdout.splitlines() if line.startswith("[")]

    return run


MISTAKES = {
    "`trainer.callbacks` must leave out StochasticWeightAveraging": [  # about which jsonargparse has a warning
        *("fit", "--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=1e-3"),
    ],
    # Lightning warns that there is no validation, before the data are read.
    "cut.jsonl, line 1: malformed JSON": ["fit", "--data=MathData", "--data.train=cut.jsonl"],
    "`validate` needs `data.val`": ["validate", "--data=MathData", "--data.train=train.jsonl"],
    "`ckpt_path` must be a whole checkpoint": ["fit", "--ckpt_path=text.ckpt"],
    "`policy` '' cannot be loaded": ["fit", "--model.policy="],
    "`num_samples` must be at least 1": ["fit", "--evaluation.num_samples=0"],
}


def test_a_mistake_is_the_last_line_on_the_console(console):
    for said, (code, lines, loaded) in zip(MISTAKES, console(*MISTAKES.values()), strict=True):
        assert code == 2
        assert not loaded
        assert lines[-1].startswith(f"grail-lightning: error: {said}"), lines
        assert not any("Traceback" in line for line in lines)


def test_a_run_without_validation_says_so_once_and_what_libraries_say_is_not_lost(console):
    once = ["--trainer.max_epochs=1", "--trainer.val_check_interval=1.0", "--trainer.check_val_every_n_epoch=1"]
    ((code, lines, loaded),) = console(["fit", "--data=MathData", "--data.train=train.jsonl", *once])
    assert (code, loaded) == (0, True)
    about = [line for line in lines if ("valid" in line and "was configured so" not in line) or "monitored key" in line]
    assert about == ["No dataset for validation: no accuracy is measured, and no best checkpoint is kept."]
    assert lines[0] == "Seed set to 0"
    assert any(line.startswith("GPU available") for line in lines)
