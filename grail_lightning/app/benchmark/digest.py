"""A digest of what a figure depends on: the method and its options, the rollouts, and the code."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grail_lightning.core.credit.base import TokenCredit
from grail_lightning.core.credit.service import with_inner

_PACKAGE = Path(__file__).parents[2]
_CODE = ("core", "gallery", "worlds", "answers", "app/benchmark")
_SHOWING = frozenset(
    (
        *("board", "claims", "detection_claims", "digest", "main", "pictures", "processes", "recorded", "report"),
        *("result", "tables", "training", "training_figures", "training_progress", "verdict"),
    )
)
"""Modules of the benchmark that no figure of a world depends on."""
LIBRARIES = ("torch", "transformers", "numpy", "scipy")


@cache
def code_digest() -> str:
    """Of the package's Python and data that figures depend on, and of the versions of the libraries."""
    digest = hashlib.sha256(" ".join(version(name) for name in LIBRARIES).encode())
    code = (file for part in _CODE for file in (_PACKAGE / part).rglob("*.py"))
    data = [*(_PACKAGE / "app/benchmark/data").glob("*.npz"), *(_PACKAGE / "worlds/assets").rglob("*.safetensors")]
    for file in sorted(
        [*(file for file in code if file.parent.name != "benchmark" or file.stem not in _SHOWING), *data]
    ):
        digest.update(str(file.relative_to(_PACKAGE)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def digest_of(parts: Sequence[object], **facts: Any) -> str:
    """Of the package, of the files that define the classes of these objects, and of facts that JSON can hold."""
    digest = hashlib.sha256((code_digest() + json.dumps(facts, sort_keys=True, default=str)).encode())
    inner = [one for part in parts for one in (with_inner(part) if isinstance(part, TokenCredit) else [part])]
    for file in sorted({file for part in inner for file in users_files(type(part))}):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def users_files(cls: type) -> set[Path]:
    """The file of a class outside of this package, and those of the modules from its folder that are imported."""
    files = {
        name: Path(file).resolve()
        for name, module in [*sys.modules.items()]
        if (file := getattr(module, "__file__", None))
    }
    defined = files.get(cls.__module__)
    if defined is None or _PACKAGE in defined.parents:
        return set()
    return {
        file for file in files.values() if file.parent == defined.parent and file.suffix == ".py" and file.is_file()
    }
