"""An import goes to a lower layer, or stays in its package, and never in a circle (see CONTRIBUTING.md)."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import grail_lightning

PACKAGE = Path(grail_lightning.__file__).parent
TABLE = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
LAYER_OF = {
    name: int(layer)
    for layer, names in re.findall(r"^\| (\d+) \| (.*?) \|", TABLE, re.M)
    for name in re.findall(r"`(\w+)`", names)
}
FILES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


# What types alone need, and may not be imported otherwise: the name of a package stands for all of its modules.
FOR_TYPES = {("callbacks", "module"), ("credit.base", "credit.saliency")}


def _imports(file, at_top=False):
    """Modules of ours that a file imports, at its top or inside a function, and what types need but for `FOR_TYPES`."""
    tree = ast.parse(file.read_text())
    name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    excused = {f"grail_lightning.{to}" for of, to in FOR_TYPES if name == of or name.startswith(f"{of}.")}
    lazy = file.name == "__init__.py"  # Exports that are imported when they are asked for.
    if at_top:
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
        if isinstance(node, ast.ImportFrom) and (at_top or lazy or node.module in excused)
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


def _package(module):
    return module.split(".")[1]


def test_every_package_and_module_has_a_layer():
    there = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {"__init__"}
    assert there == LAYER_OF.keys()


def test_imports_go_to_a_lower_layer(imports):
    edges = {
        (_package(module), _package(other))
        for module, others in imports.items()
        for other in others
        if "." in module and "." in other and _package(module) != _package(other)
    }
    assert ("step", "credit") in edges, "the walk must see the edges that are there"
    assert not sorted(f"{a} -> {b}" for a, b in edges if LAYER_OF[b] >= LAYER_OF[a])


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
    """Who follows a step from `module` by what is imported at the top of files meets no saliency and no tools."""
    found, ahead = set(), ["grail_lightning.module"]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += _imports(FILES[name], at_top=True)
    step = ("step.fused", "step.credit_needs", "step.episodes")
    others = ("sdpg", "credit.distillation", "credit.saliency", "engines.hf", "environments.tools", "answers.verifier")
    assert "grail_lightning.step.update" in found
    assert not found & {f"grail_lightning.{name}" for name in (*step, *others)}
