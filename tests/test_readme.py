"""The README's code runs as it stands."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from grail_lightning.module import GrailModule
from tests.runs import Watch, batches, module, trainer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", README, re.DOTALL)


def test_ten_lines_of_python_train_a_policy(tmp_path, monkeypatch):
    """Cut to one step; everything else is the text itself."""
    monkeypatch.chdir(tmp_path)
    program = PROGRAMS[0].replace("max_steps=120", 'max_steps=1, accelerator="cpu", enable_progress_bar=False')
    program = program.replace("callbacks=default_callbacks()", "callbacks=default_callbacks(progress_bar=False)")
    program = program.replace("prompts_per_batch=16", "prompts_per_batch=2, num_val=4")
    assert "max_steps=1," in program
    assert "num_val=4" in program
    names = {}
    exec(compile(program, "README.md", "exec"), names)
    assert isinstance(names["module"], GrailModule)
    assert names["trainer"].global_step == 1
    assert "val/accuracy" in names["trainer"].callback_metrics


def test_a_credit_method_of_ones_own_trains():
    names = {}
    exec(compile(PROGRAMS[1], "README.md", "exec"), names)
    watch = Watch()
    trainer(1, watch).fit(module(credit=names["Surprise"](top=3.0)), batches(1))
    values = watch.outputs[0].weights.values
    assert values.max() > 1
    assert (values[~watch.outputs[0].batch.response_mask] == 0).all()
    assert torch.isfinite(values).all()


def test_the_first_program_has_ten_lines_beside_imports():
    lines = [line for line in PROGRAMS[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 10


@pytest.mark.parametrize("name", re.findall(r"\]\(([\w/.]+\.(?:md|png))\)", README))
def test_what_the_readme_links_to_exists(name):
    assert (ROOT / name).is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="the Makefile needs make")
def test_the_makefiles_targets_in_the_readme_exist():
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    for target in set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}\s", listed, re.MULTILINE), target
