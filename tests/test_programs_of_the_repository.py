"""Programs beside the package import what is there, and call it as it is: no test runs all of them."""

import subprocess
import sys
from pathlib import Path

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
