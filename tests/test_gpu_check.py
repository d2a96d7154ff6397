"""The check of a GPU: what it says of parts that fail, and every part tried in small on a CPU."""

import argparse
import subprocess
import sys

import pytest

from tests.benchmark_modules import BENCHMARKS, benchmark


@pytest.mark.parametrize(
    ("part", "program", "said"),
    [
        ("trl", None, "skipped: TRL is not installed"),
        ("sampling", "import time; time.sleep(60)", "failed: stopped after 0.5 s"),
        ("sampling", "raise SystemExit(3)", "failed: exit code 3"),
    ],
)
def test_a_part_that_is_left_out_or_does_not_end_well_says_so(part, program, said, monkeypatch, capsys):
    check, limit = benchmark("gpu_check"), 0.5 if program and "sleep" in program else 60.0
    options = argparse.Namespace(device="cpu", models=None, peak_tflops=None, limit=limit)
    monkeypatch.setitem(sys.modules, "trl", None)
    if program:
        monkeypatch.setattr(check, "command_of", lambda *_: ["-c", program])
    assert check.run(part, "tiny", options) is (program is None)
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_every_part_of_the_gpu_check_runs_on_a_cpu_in_small(tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in (
        "a_deterministic_run_repeats_bit_for_bit PASSED",
        "| 1024 | ",
        "| GRPO | 1 | ",
        "| GRAIL | 4 | ",
        "| ours, ",
    ):
        assert row in done.stdout, row
    assert "failed" not in done.stdout
