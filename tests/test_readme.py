"""The README is short, and what it names is there. Its commands are parsed in tests/docs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_read_in_two_minutes():
    assert len(README.encode()) < 8000


@pytest.mark.parametrize("name", re.findall(r"\]\(([\w/.]+\.(?:md|png))(?:#[\w-]+)?\)", README))
def test_what_the_readme_links_to_exists_in_a_checkout_and_in_the_package(name):
    assert (ROOT / name).is_file()
    assert (ROOT / "grail_lightning" / name).is_file(), "setup.cfg lists what is installed"


@pytest.mark.skipif(shutil.which("make") is None, reason="the Makefile needs make")
def test_the_makefiles_targets_in_the_readme_exist():
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    for target in set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}\s", listed, re.MULTILINE), target
