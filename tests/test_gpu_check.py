"""The check of a GPU, tried in small on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
def test_every_part_of_the_gpu_check_runs_on_a_cpu_in_small(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    for part in ("correctness", "sampling", "step", "credit"):
        assert any(line.startswith(f"| {part} |") for line in table), part
    assert "failed" not in done.stdout
