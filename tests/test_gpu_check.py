"""The check of a GPU: its table, what it says of parts that fail, and every part tried in small on a CPU."""

import argparse
import subprocess
import sys

import pytest

from tests.benchmark_modules import BENCHMARKS, benchmark

pytest_plugins = ["pytester"]


@pytest.fixture
def check():
    return benchmark("gpu_check")


@pytest.fixture
def options():
    return argparse.Namespace(device="cpu", models=None, peak_tflops=None, limit=60.0)


def test_the_table_shows_the_last_figure_of_each_name_in_the_order_of_the_parts(check, tmp_path, capsys):
    for what, unit, measured in (
        ("update", "s", 3.0),
        ("update", "s", 2.0),
        ("peak", "GiB", None),
        ("MFU", "%", 0.351),
    ):
        check.add_row(tmp_path / "step_tiny.jsonl", what, measured, unit)
    check.add_row(tmp_path / "correctness_tiny.jsonl", "deterministic", "1 failed (a | b)")
    check.show(tmp_path)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| correctness | deterministic | 1 failed (a / b) |",
        "| step | update | 2.00 s |",
        "| step | peak | - |",
        "| step | MFU | 35.1% |",
    ]


def test_without_trl_its_part_is_one_row_that_says_so(check, options, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert check.take_part("trl", options, tmp_path)
    check.show(tmp_path)
    assert "skipped: TRL is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "measured"),
    [
        ("import time; time.sleep(60)", "stopped after 0.5 s"),
        ("raise RuntimeError('out of memory')", "RuntimeError: out of memory"),
        ("raise SystemExit('gpu_check.py: error: invalid choice')", "gpu_check.py: error: invalid choice"),
    ],
    ids=["too long", "error", "exit"],
)
def test_a_part_that_does_not_end_well_is_a_row_with_its_last_words(
    program, measured, check, options, tmp_path, monkeypatch, capsys
):
    options.limit = 0.5 if "sleep" in program else 60.0
    (tmp_path / "gpu_check.py").write_text(program)
    monkeypatch.setattr(check, "__file__", str(tmp_path / "gpu_check.py"))
    check.add_row(tmp_path / "sampling_tiny.jsonl", "a row of an earlier run", 1.0)
    assert not check.take_part("sampling", options, tmp_path)
    check.show(tmp_path)
    rows = capsys.readouterr().out.splitlines()[3:]
    assert rows[0] == f"| sampling | tiny, failed | {measured} |"
    assert rows[1].startswith("| sampling | time of this part | ")


def test_each_test_is_a_row_with_its_outcome(check, pytester):
    rows = []
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize('n', [1, 3])
        def test_small_numbers_are_small(n):
            assert n < 3, 'a big one'
        def test_that_needs_what_is_not_there():
            pytest.skip('no kernel')
        """
    )
    outcomes = check.Outcomes(argparse.Namespace(row=lambda *row: rows.append(row)))
    pytester.inline_run("-p", "no:cacheprovider", "--tb", "short", plugins=[outcomes])
    assert rows[0] == ("small numbers are small[1]", "passed")
    assert rows[1][0] == "small numbers are small[3]"
    assert rows[1][1].startswith("failed (")
    assert rows[2] == ("that needs what is not there", "skipped (no kernel)")


@pytest.mark.slow
def test_every_part_of_the_gpu_check_runs_on_a_cpu_in_small(tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)]
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
