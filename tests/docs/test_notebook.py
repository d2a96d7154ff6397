"""The notebook runs from its first cell to its last one, and is stored with what it showed."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "examples" / "first_run.ipynb"


def code(notebook):
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def gain(cells):
    """The first and the last accuracy that the training printed."""
    printed = "".join(line for cell in cells for output in cell["outputs"] for line in output.get("text", []))
    return [float(number) for number in re.search(r"held-out accuracy: ([0-9.]+) -> ([0-9.]+)", printed).groups()]


def coloured(cells):
    """The backgrounds of the tokens that the last cell shows."""
    (shown,) = (output for output in cells[-1]["outputs"] if "text/html" in output.get("data", {}))
    return re.findall(r"background-color:rgb\((\d+,\d+,\d+)\)", "".join(shown["data"]["text/html"]))


def test_the_notebook_runs_in_a_fresh_process_and_learns(tmp_path):
    target = tmp_path / "run.ipynb"
    subprocess.run([sys.executable, ROOT / "scripts" / "run_notebook.py", NOTEBOOK, target], cwd=tmp_path, check=True)
    stored, again = code(NOTEBOOK), code(target)
    assert [cell["source"] for cell in stored] == [cell["source"] for cell in again]
    for cells in (stored, again):
        before, after = gain(cells)
        assert after > before + 0.1
        assert len({*coloured(cells)}) > 20
        assert not any("<script" in line for cell in cells for output in cell["outputs"] for line in str(output))
