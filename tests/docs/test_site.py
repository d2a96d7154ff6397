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


def build(folder, page, **others):
    """What `make docs` says about a site of one page in its menu, and whether it fails."""
    (command,) = re.findall(r"-m (mkdocs build .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings |= {"hooks": [], "nav": [{"Page": "index.md"}], "plugins": [], "extra_css": []}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (folder / "docs").mkdir()
    for name, text in {"index": page, **others}.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    program = [sys.executable, "-m", *command.split()]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_page_whose_links_lead_somewhere_is_built(tmp_path):
    code, said = build(tmp_path, "# Page\n\n[here](#page)\n")
    assert code == 0, said
    html = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r"<(?:link|script)[^>]+(?:href|src)=.?https?://", html), "nothing is fetched by a reader"


def test_links_that_lead_nowhere_and_a_page_without_a_place_in_the_menu_are_errors(tmp_path):
    wrong = ["[x](#nowhere)", "[x](nowhere.md)", "![x](/nowhere.png)"]
    code, said = build(tmp_path, "# Page\n\n" + "\n".join(wrong) + "\n", other="# Other\n")
    assert code == 1, "warnings are errors"
    assert said.count("WARNING") == 4
    for named in ("'#nowhere'", "'nowhere.md'", "'/nowhere.png'", "other.md"):
        assert named in said


def test_a_piece_of_a_file_that_is_not_there_is_an_error(tmp_path):
    code, said = build(tmp_path, '# Page\n\n--8<-- "nowhere.py"\n')
    assert code == 1
    assert "nowhere.py" in said
