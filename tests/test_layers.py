"""An import goes to a lower layer, or stays in its package, and never in a circle (see CONTRIBUTING.md)."""

import ast
import re
import subprocess
import sys
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


def _imports(file, at_top=False):
    """Modules of ours that a file imports, at its top or inside a function; what types alone need is imported, too."""
    tree = ast.parse(file.read_text())
    lazy = file.name == "__init__.py"  # Exports that are imported when they are asked for.
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
    step = ("step.fused", "gallery.second_model", "step.episodes")
    others = ("credit.saliency", "credit.measure", "engines.hf", "environments.tools", "answers.verifier")
    assert "grail_lightning.step.update" in found
    assert not found & {f"grail_lightning.{name}" for name in (*step, *others)}


# The modules of methods beyond the core.
GALLERY = (
    "sdpg",
    "credit.distillation",
    "credit.critic",
    "credit.entropy",
    "credit.oracle",
    "gallery.code_credit",
    "gallery.energy",
    "gallery.igpo",
    "credit.rhythm",
    "credit.spans",
    "credit.tree",
    "credit.turns",
)


def test_the_module_and_the_command_line_load_no_credit_method_that_is_not_named():
    said = (
        "import sys, grail_lightning.cli.app as app;"
        "first = {m for m in sys.modules if m.startswith('grail_lightning.')};"
        "credit = ['--model.credit=PermutedRewards', '--model.credit.inner=DGPO'];"
        "app.FitOptions().parse(['--config=quickstart.yaml', *credit]);"
        "print(*first); print(*{m for m in sys.modules if m.startswith('grail_lightning.')} - first)"
    )
    end = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in end.stdout.splitlines())
    methods = {f"grail_lightning.{name}" for name in (*GALLERY, "credit.controls", "credit.grail", "credit.oar")}
    methods |= {name for name in FILES if name.startswith("grail_lightning.gallery")}
    assert methods <= FILES.keys()
    assert "grail_lightning.module" in before
    assert not before & methods
    assert after & methods == {"grail_lightning.credit.controls", "grail_lightning.credit.entropy"}
