"""The tables of docs/models.md and docs/one_gpu.md are what their programs say; architectures do what they did."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmark_modules import script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_tables_of_models_are_those_of_the_results():
    models = script("try_models")
    page = (DOCS / "models.md").read_text()
    assert models.filled(page) == page, "run python scripts/try_models.py --page"
    tried = models.read_results()
    assert sum(one.outcome == "trains" for one in tried) > 100
    assert {one.outcome for one in tried} == {"trains", "refused", "not tried"}
    for name in models.FAMILIES.values():
        (one,) = [one for one in tried if one.model_type == name]
        assert (one.outcome, one.saliency) == ("trains", "yes"), name


def test_the_table_of_memory_is_planned(monkeypatch):
    table = script("one_gpu_table")
    page = (DOCS / "one_gpu.md").read_text()
    (shown,) = re.findall(f"{table.BEGIN}(.*?){table.END}", page, re.DOTALL)
    monkeypatch.setattr(table, "MODELS", {"0.6B": table.MODELS["0.6B"]})  # The others take longer.
    head, rule, *rows = table.table().splitlines()
    assert [head, rule, *rows] == shown.strip().splitlines()[: 2 + len(rows)], "run python scripts/one_gpu_table.py"
    for config in ("gsm8k", "gsm8k_lora"):
        assert f"`configs/{config}.yaml`" in page


@pytest.mark.slow
def test_the_whole_table_of_memory_is_planned():
    table, page = script("one_gpu_table"), (DOCS / "one_gpu.md").read_text()
    assert table.filled(page) == page, "run python scripts/one_gpu_table.py"


@pytest.mark.slow
def test_the_families_of_the_page_train_and_are_sampled_as_it_says():
    """In a process of its own, as a reader runs it: some minutes for all architectures, one for these."""
    models = script("try_models")
    names = sorted({*models.FAMILIES.values()})
    command = [sys.executable, str(ROOT / "scripts" / "try_models.py"), *names]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-2000:]
    known = {one.model_type: one for one in models.read_results()}
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines] == names
    for name, _, *found in lines:
        one = known[name]
        assert found[:4] == [one.outcome, one.sampled_by, one.shares, one.saliency], name
