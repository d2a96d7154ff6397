"""The check of a GPU: its table, what it says of parts that fail, and every part tried in small on a CPU."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(device="cpu", models=None, peak_tflops=None, limit=540.0, out=tmp_path / "out.jsonl")


def row(what, measured, run=1, model="tiny", unit="s", part="step", device="CPU"):
    key = {"device": device, "run": run, "part": part, "model": model}
    return json.dumps(key | {"what": what, "measured": measured, "unit": unit}) + "\n"


def test_the_table_shows_the_last_run_of_each_part(check, options, capsys):
    options.out.write_text(
        row("update", 3.0)
        + row("failed", "out of memory", unit="")
        + row("update", None, run=2)
        + row("update", 2.0, run=2)
        + row("update", 8.0, model="4b")
        + row("update", 9.0, device="another")
        + row("peak", None, run=2, unit="GiB")
        + row("MFU", 0.351, run=2, unit="%")
        + row("deterministic", "1 failed (a | b)", part="correctness", model="", unit="")
    )
    check.Table(options.out, "CPU").show()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| correctness | deterministic | 1 failed (a / b) |",
        "| step | update | 2.00 s |",
        "| step | update | 8.00 s |",
        "| step | peak | - |",
        "| step | MFU | 35.1% |",
    ]


def test_without_trl_its_part_is_one_row_that_says_what_to_install(check, options, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    table = check.Table(options.out, "CPU")
    assert check.take_part("trl", options, table, "CPU")
    (skipped, time) = table.rows()
    assert skipped["measured"] == "skipped: TRL is not installed; pip install trl==1.16.0"
    assert time["what"] == "time of this part"


@pytest.mark.parametrize(
    ("program", "measured"),
    [
        ("import time; time.sleep(60)", "stopped: the part took more than 0.5 s"),
        ("raise RuntimeError('out of memory')", "RuntimeError: out of memory"),
        ("raise SystemExit('gpu_parts.py: error: invalid choice')", "gpu_parts.py: error: invalid choice"),
    ],
    ids=["too long", "error", "exit"],
)
def test_a_part_that_does_not_end_well_is_a_row_with_its_last_words(program, measured, check, options, monkeypatch):
    options.limit = 0.5 if "sleep" in program else 60.0
    monkeypatch.setattr(check, "PART_SECONDS", 0)
    monkeypatch.setattr(check, "__file__", str(options.out.with_name("gpu_check.py")))
    options.out.with_name("gpu_parts.py").write_text(program)
    table = check.Table(options.out, "CPU")
    assert not check.take_part("sampling", options, table, "CPU")
    failed, time = table.rows()
    assert (failed["what"], failed["measured"]) == ("tiny, failed", measured)
    assert time["measured"].endswith(", more than 0 minutes")


def test_each_test_function_is_a_row_with_its_outcomes(check, pytester):
    rows = []
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize('n', [1, 2, 3])
        def test_small_numbers_are_small(n):
            assert n < 3, 'a big one'
        def test_that_needs_what_is_not_there():
            pytest.skip('no kernel')
        """
    )
    outcomes = importlib.import_module("gpu_parts").Outcomes(argparse.Namespace(row=lambda *row: rows.append(row)))
    pytester.inline_run("-p", "no:cacheprovider", plugins=[outcomes])
    assert rows[-2:] == [
        ("small numbers are small", "2 passed, 1 failed (3: AssertionError: a big one)"),
        ("that needs what is not there", "1 skipped (no kernel)"),
    ]


@pytest.mark.slow
def test_every_part_of_the_gpu_check_runs_on_a_cpu_in_small(tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    shown = {(cells[0].removeprefix("| "), cells[1].rpartition(", ")[2]): cells for cells in table}
    for name in (
        ("correctness", "a deterministic run repeats bit for bit"),
        ("sampling", "time"),
        ("step", "sample"),
        ("step", "update"),
        ("step", "whole step"),
        ("credit", "without sampling"),
        ("trl", "ours"),
    ):
        assert name in shown, name
    assert shown["trl", "ours / TRL"][2].removesuffix(" |").endswith(" x")
    assert "failed" not in done.stdout
