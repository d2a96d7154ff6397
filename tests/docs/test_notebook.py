"""The notebook runs from its first cell to its last one, cut to fewer steps, and is stored with what it showed."""

import base64
import io
import json
import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "docs" / "examples" / "first_run.ipynb").read_text())["cells"]
STEPS = "max_steps=40"


def gain(outputs):
    """The first and the last accuracy that the training printed."""
    printed = "".join(line for output in outputs for line in output.get("text", []))
    return [float(number) for number in re.search(r"held-out accuracy: ([0-9.]+) -> ([0-9.]+)", printed).groups()]


def colours(outputs):
    """The colours of the picture that the last cell shows."""
    (shown,) = (output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {}))
    return Image.open(io.BytesIO(base64.b64decode(shown))).convert("RGB").getcolors(10**6)


@pytest.mark.slow
def test_the_notebook_runs_and_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_cell = runpy.run_path(str(ROOT / "scripts" / "run_notebook.py"))["run_cell"]
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    assert sum(source.count(STEPS) for source in sources) == 1
    names, again = {"__name__": "__main__"}, []
    for number, source in enumerate(sources, start=1):
        again += run_cell(source.replace(STEPS, "max_steps=12"), names, number)
    stored = [output for cell in code for output in cell["outputs"]]
    for outputs, least in ((stored, 0.3), (again, 0.1)):
        before, after = gain(outputs)
        assert after > before + least
        assert len(colours(outputs)) > 20
