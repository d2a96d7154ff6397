"""The settings of the documentation site refuse what leads nowhere, by the command of `make docs`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")


@pytest.fixture
def build(tmp_path):
    """What `make docs` says about a site of one page, and whether it fails."""
    (command,) = re.findall(r"-m (mkdocs build .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings |= {"hooks": [], "nav": [{"Page": "index.md"}], "plugins": [], "extra_css": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "docs").mkdir()

    def run(page, **others):
        for name, text in {"index": page, **others}.items():
            (tmp_path / "docs" / f"{name}.md").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=tmp_path,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr

    return run


def test_a_page_whose_links_lead_somewhere_is_built(build, tmp_path):
    code, said = build("# Page\n\n[here](#page)\n")
    assert code == 0, said
    html = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r"<(?:link|script)[^>]+(?:href|src)=.?https?://", html), "nothing is fetched by a reader"


@pytest.mark.parametrize("link", ["[x](#nowhere)", "[x](nowhere.md)", "![x](nowhere.png)", "[x](/nowhere.md)"])
def test_a_link_that_leads_nowhere_is_an_error(build, link):
    code, said = build(f"# Page\n\n{link}\n")
    assert code == 1
    assert "nowhere" in said


def test_a_page_without_a_place_and_a_file_that_is_not_there_are_errors(build):
    assert build("# Page\n", other="# Other\n")[0] == 1
    assert build('# Page\n\n--8<-- "nowhere.py"\n')[0] == 1
