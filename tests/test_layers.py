"""An import goes to a lower layer, or stays in its package, and never in a circle (see CONTRIBUTING.md)."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import grail_lightning

PACKAGE = Path(grail_lightning.__file__).parent
TABLE = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (?:`(\w+)`)?.*? \| (`.*?`) \|", TABLE, re.M)
LAYER_OF = {
    f"{wing}.{name}".strip("."): int(layer) for layer, wing, names in ROWS for name in re.findall(r"`(\w+)`", names)
}
WINGS = ("answers", "core", "worlds", "gallery", "app")
FOLDERS = ("core", "worlds", "app")  # Wings whose folders and files have places of their own.
FILES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


def _imports(file, at_top=False):
    """Modules of ours that a file imports, at its top or inside a function, and what types need."""
    tree = ast.parse(file.read_text())
    lazy = "__getattr__" in file.read_text()  # Exports that are imported when they are asked for.
    if at_top:
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
        if isinstance(node, ast.ImportFrom) and (at_top or lazy)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in FILES and id(node) not in for_types:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)


@pytest.fixture(scope="module")
def imports():
    """What each module imports of ours."""
    return {name: set(_imports(file)) - {name} for name, file in FILES.items()}


def _place(module):
    """The folder of a wing, or the file in it, that a module is or belongs to; a wing of one folder is that wing."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] in FOLDERS else parts[0]


def _has_place(module):
    return "." in module and module.split(".", 1)[1] not in FOLDERS


def test_every_folder_and_file_of_a_wing_has_a_layer():
    places = {_place(module) for module in FILES if _has_place(module)}
    assert places - {"__main__"} == LAYER_OF.keys()
    lowest = [min(layer for place, layer in LAYER_OF.items() if place.split(".")[0] == wing) for wing in WINGS]
    highest = [max(layer for place, layer in LAYER_OF.items() if place.split(".")[0] == wing) for wing in WINGS]
    assert all(top < bottom for top, bottom in zip(highest, lowest[1:], strict=False)), "wings stand on each other"


def test_imports_go_to_a_lower_layer(imports):
    edges = {
        (_place(module), _place(other))
        for module, others in imports.items()
        for other in others
        if _has_place(module) and _has_place(other) and _place(module) != _place(other)
    } - {(a, b) for a, b in [("__main__", "app.cli")]}
    assert ("core.step", "core.credit") in edges, "the walk must see the edges that are there"
    assert not sorted(f"{a} -> {b}" for a, b in edges if LAYER_OF[b] >= LAYER_OF[a])


def test_a_world_imports_no_other_world_but_sums(imports):
    """Word problems are chains of sums in words; nothing else of one world is known in another."""
    worlds = {name: name.split(".")[2] for name in FILES if re.match(r"grail_lightning\.worlds\.\w+\.", name)}
    edges = {(worlds[n], worlds[o]) for n in worlds for o in imports[n] if o in worlds} - {
        (w, w) for w in worlds.values()
    }
    assert {(a, b) for a, b in edges if b != "programs"} == {("words", "sums")}


def test_grading_imports_one_way(imports):
    order = re.findall(r"`(\w+)`", TABLE.partition("Inside `answers` the order is")[2].partition(", each of which")[0])
    modules = {name: name.split(".")[2] for name in FILES if name.startswith("grail_lightning.answers.")}
    assert {*modules.values()} == {*order, "__main__"}, "every module has its place in the order"
    edges = {(modules[name], modules[other]) for name in modules for other in imports[name] if other in modules}
    assert ("verifier", "judge") in edges, "the walk must see the edges that are there"
    assert not sorted(f"{a} -> {b}" for a, b in edges if a != "__main__" and order.index(b) >= order.index(a))


def test_no_files_import_each_other_in_a_circle(imports):
    assert any("." in name and others for name, others in imports.items())
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_plain_grpo_loads_nothing_that_another_option_alone_needs():
    """Who follows a step from `core.module` by what is imported at the top of files meets no saliency and no tools."""
    found, ahead = set(), ["grail_lightning.core.module"]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += _imports(FILES[name], at_top=True)
    step = ("step.fused", "step.episodes")
    others = ("credit.saliency", "engines.hf.engine", "environments.tools")
    assert "grail_lightning.core.step.update" in found
    assert not found & {f"grail_lightning.core.{name}" for name in (*step, *others)}
    assert not {name for name in found if name.split(".")[1] in ("worlds", "gallery", "app")}
    assert not found & {f"grail_lightning.answers.{name}" for name in ("verifier", "evaluated", "parse")}
