"""The check of a GPU: what it says of parts that fail, and every part tried in small on a CPU."""

import argparse
import subprocess
import sys

import pytest

from tests.benchmark_modules import BENCHMARKS, benchmark


@pytest.fixture
def check():
    return benchmark("gpu_check")


@pytest.fixture
def options():
    return argparse.Namespace(device="cpu", models=None, peak_tflops=None, limit=60.0)


def test_without_trl_its_part_is_one_line_that_says_so(check, options, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert check.run("trl", "tiny", options)
    assert "skipped: TRL is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "said"),
    [("import time; time.sleep(60)", "failed: stopped after 0.5 s"), ("raise SystemExit(3)", "failed: exit code 3")],
    ids=["too long", "error"],
)
def test_a_part_that_does_not_end_well_says_so(program, said, check, options, monkeypatch, capsys):
    options.limit = 0.5 if "sleep" in program else 60.0
    monkeypatch.setattr(check, "command_of", lambda *_: ["-c", program])
    assert not check.run("sampling", "tiny", options)
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_every_part_of_the_gpu_check_runs_on_a_cpu_in_small(tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in (
        "a_deterministic_run_repeats_bit_for_bit PASSED",
        "| static | eager | ",
        "| 1024 | ",
        "| DrGRPO | 1 | ",
        "| GRAIL | 4 | ",
        "| ours, ",
    ):
        assert row in done.stdout, row
    assert "failed" not in done.stdout
