"""What users import: names that are found where their table says, one at a time, and nothing heavy before that."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grail_lightning

LAZY = ("grail_lightning", "grail_lightning.credit", "grail_lightning.trl")
SEEN = "import sys; print(*sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'grail_lightning')))"


def _loaded_by(code):
    """The modules of ours and of torch that a new process has loaded after the code."""
    return subprocess.run(
        [sys.executable, "-c", f"{code}; {SEEN}"], check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.filterwarnings("ignore")  # Of TRL, while it is imported.
@pytest.mark.parametrize("module", LAZY)
def test_the_tables_of_a_module_agree_and_each_name_is_there(module):
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(loaded.__file__).read_text())
    (branch,) = [node for node in tree.body if isinstance(node, ast.If)]
    for_types = {alias.name: node.module for node in branch.body for alias in node.names}
    assert for_types == loaded._EXPORTS
    assert {*loaded.__all__} - {"__version__"} == for_types.keys()
    for name, place in for_types.items():
        assert getattr(loaded, name) is getattr(importlib.import_module(place), name)


def test_the_package_loads_no_torch_and_a_name_loads_no_method_of_the_gallery():
    assert "torch" not in _loaded_by("import grail_lightning, grail_lightning.credit, grail_lightning.trl")
    loaded = _loaded_by(
        "from grail_lightning import GrailModule; from grail_lightning.credit import GRAIL; GrailModule, GRAIL"
    )
    assert "grail_lightning.core.credit.grail" in loaded
    assert not [name for name in loaded if name.split(".")[1:2] in (["gallery"], ["worlds"], ["app"])]


def test_the_command_line_loads_the_methods_that_its_arguments_name_alone():
    credit = ["--config=quickstart.yaml", "--model.credit=PermutedRewards", "--model.credit.inner=DGPO"]
    parse = f"from grail_lightning.app.cli.app import FitOptions; FitOptions().parse({credit})"
    loaded = {name for name in _loaded_by(parse) if name.startswith("grail_lightning.gallery.")}
    assert loaded == {"grail_lightning.gallery.entropy"}


IMPORT = re.compile(r"(?:^|\n|\\n\",\s*\")\s*(?:from|import) (grail_lightning[\w.]*)")


@pytest.mark.parametrize("folder", ["README.md", "docs"])
def test_pages_and_examples_import_nothing_from_inside_the_wings(folder):
    place = Path(__file__).parents[1] / folder
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.suffix in (".md", ".py", ".ipynb")]
    found = {(str(file.relative_to(place.parent)), name) for file in files for name in IMPORT.findall(file.read_text())}
    assert folder != "docs" or len(found) > 20
    wings = ("core", "gallery", "worlds", "app")
    assert not {(file, name) for file, name in found if name.split(".")[1:2] and name.split(".")[1] in wings}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        grail_lightning.Nothing  # noqa: B018
