"""Two CPU processes: replicated (DDP) and fully sharded (FSDP2) weights do the same."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")


@cache
def _run(strategy, credit):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), strategy, credit], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(reports, key=lambda report: report["rank"])


@pytest.mark.parametrize("credit", ["GRAIL", pytest.param("OARGradient", marks=pytest.mark.slow)])
def test_sharded_weights_train_as_replicated_ones_do(credit):
    replicated, sharded = _run("ddp", credit), _run("fsdp2", credit)
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours["texts"] == theirs["texts"]
        assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-7)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-6)


def test_ranks_sample_different_responses_and_agree_on_weights_and_metrics():
    first, second = _run("ddp", "GRAIL")
    assert first["texts"] != second["texts"]
    assert first["weights"] == second["weights"]
    assert "credit/eligible" in first["metrics"]
    for name in first["metrics"]:
        assert first["metrics"][name] == pytest.approx(second["metrics"][name], rel=1e-6), name
