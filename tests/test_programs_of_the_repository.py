"""Programs beside the package import what is there, and call it as it is: no test runs all of them."""

import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_every_program_can_be_imported(folder):
    names = sorted(file.stem for file in (ROOT / folder).glob("*.py"))
    assert len(names) > 9
    code = f"import sys, importlib; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / folder)!r}]\n"
    code += f"for name in {names}:\n    importlib.import_module(name)"
    end = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert end.returncode == 0, end.stderr[-2000:]


@pytest.mark.slow
def test_an_earlier_version_is_timed_by_its_own_copy_of_the_script(tmp_path):
    """The copy has a name that the present version lacks, and reports one token a step."""
    for folder in ("grail_lightning", "benchmarks"):
        copytree(ROOT / folder, tmp_path / folder, ignore=ignore_patterns("*.npz", "board", "__pycache__"))
    timed = tmp_path / "benchmarks/step_vs_trl.py"
    code = timed.read_text(encoding="utf-8").replace("DrGRPO(", "FormerObjective(").replace("int(sampled.sum())", "1")
    timed.write_text(code.replace("    DrGRPO,\n", "    DrGRPO as FormerObjective,\n"), encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks/step_vs_trl.py"), "--case", "tiny", "--rounds", "1"]
    end = subprocess.run(
        [*command, "--before", str(tmp_path), "--trl-rows"], capture_output=True, text=True, cwd=tmp_path
    )
    assert end.returncode == 0, end.stderr[-3000:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in end.stdout.splitlines() if "tokens |" in line]
    ours, before = cells
    assert ours[0] == "ours, 16384 tokens"
    assert int(ours[6]) > 100
    assert before[0] == f"{tmp_path}, 16384 tokens"
    assert int(before[6]) < 100
    assert before[8] == "base"
