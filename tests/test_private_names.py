"""The private names of other libraries that the package uses are those of the table in CONTRIBUTING.md."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def nodes():
    """The syntax trees of all files, node by node."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "grail_lightning").rglob("*.py"))
    return [node for tree in trees for node in ast.walk(tree)]


def private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined():
    """How often the package defines a name: as a function, a class, a variable, or an attribute of `self` or `cls`."""
    names = Counter()
    for node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node.value):
            names[node.attr] += 1
    return names


def of_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def of_super(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def borrowed():
    """Private names that are read, written or imported, and are not the package's own."""
    ours, found = defined(), set()
    for node in nodes():
        if isinstance(node, ast.Attribute) and private(node.attr):
            # A method that calls its parent's is one definition: the parent's must be another.
            if ours[node.attr] < (2 if of_super(node.value) else 1):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("grail_lightning", "_typeshed")):
            found |= {part for part in (node.module or "").split(".") if private(part)}
            found |= {alias.name for alias in node.names if private(alias.name)}
        elif isinstance(node, ast.Import):
            theirs = (alias.name for alias in node.names if not alias.name.startswith("grail_lightning"))
            found |= {part for name in theirs for part in name.split(".") if private(part)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and private(str(arg.value))}
    # Documented members of named tuples; `_typeshed` is for type checkers alone.
    return found - {"_replace", "_fields"}


def test_private_names_of_libraries_stand_in_the_table_of_contributing():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("**Private names.**")[2].partition("\n**")[0]
    listed = {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed, "CONTRIBUTING.md has no table of private names"
    assert borrowed() == listed
