"""The part `correctness` of gpu_check.py: the tests marked `gpu`, a row for each test function as soon as it ends."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


class Outcomes:
    """A plugin of pytest that writes a row for each test function.

    Args:
        check: Has the method `row`.
    """

    def __init__(self, check: Any) -> None:
        self.check = check
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name, _, case = report.nodeid.rpartition("::")[2].removeprefix("test_").partition("[")
        self.counts[name][report.outcome] += 1
        if report.outcome != "passed":
            reason = _reason(report)
            self.reasons[name].append(f"{case.rstrip(']')}: {reason}" if case and report.failed else reason)
        counted = ", ".join(f"{number} {outcome}" for outcome, number in self.counts[name].items())
        reasons = "; ".join(dict.fromkeys(self.reasons[name]))
        self.check.row(name.replace("_", " "), f"{counted} ({reasons})" if reasons else counted)


def _reason(report: Any) -> str:
    """One line, of at most 160 characters."""
    if report.skipped:
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    return " ".join(lines[0].split())[:160] if lines else "no message"


def correctness(check: Any) -> None:
    """Run the tests.

    Raises:
        SystemExit: If a test fails, or pytest itself.
    """
    sys.path.insert(0, str(ROOT))  # The tests import one another as `tests.NAME`.
    files = ["tests/test_gpu.py"] if check.small else ["tests/test_gpu.py", "tests/test_trees.py"]
    # Warnings are errors in the suite. Libraries have others on GPUs, which say nothing about results.
    options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "--tb", "short"]
    code = pytest.main([*options, *(str(ROOT / file) for file in files)], plugins=[Outcomes(check)])
    if code:
        raise SystemExit(f"pytest ended with {code!r}")
