"""An import goes to a strictly lower floor, or stays in its room (see CONTRIBUTING.md)."""

import ast
from pathlib import Path

import grail_lightning

PACKAGE = Path(grail_lightning.__file__).parent
FLOORS = {
    0: {
        *("_version", "rollout", "functional", "answers", "ranks", "seeds", "folder_lock", "clock", "checks"),
        *("commands", "config_files", "optimizer_check", "quiet", "writable"),
    },
    1: {"policy", "locate", "tasks", "objective", "outputs", "run_folder"},
    2: {"grading", "engines", "credit", "data", "metrics", "update", "stepping", "reports", "refill"},
    3: {"module", "choices"},
    4: {"callbacks", "option_errors", "run_config", "stage_loggers"},
    5: {"errors"},
    6: {"cli"},
    7: {"__main__"},
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}


def _room(module):
    return module.removeprefix("grail_lightning").strip(".").split(".")[0]


def _imports(file):
    """Rooms that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grail_lightning"):
            yield from (
                [alias.name for alias in node.names] if node.module == "grail_lightning" else [_room(node.module)]
            )
        elif isinstance(node, ast.Import):
            yield from (_room(alias.name) for alias in node.names if alias.name.startswith("grail_lightning."))


def _edges():
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            yield from ((room, other) for other in _imports(file) if other != room)


def test_every_room_has_a_floor():
    rooms = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {"__init__"}
    assert rooms == FLOOR_OF.keys()


def test_imports_go_to_a_lower_floor():
    edges = set(_edges())
    assert ("module", "credit") in edges, "the walk must see the edges that are there"
    uphill = sorted(f"{a} -> {b}" for a, b in edges if FLOOR_OF[b] >= FLOOR_OF[a])
    assert not uphill
