"""A model's answer: where it stands in the text, which tokens carry it, and whether it is right. Imports no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grail_lightning.answers.conventions import Conventions
    from grail_lightning.answers.extract import Box, box_content, find_boxes, last_box
    from grail_lightning.answers.spans import Alignment, align, token_span
    from grail_lightning.answers.verifier import Verdict, Verifier

__all__ = [
    "Alignment",
    "Box",
    "Conventions",
    "Verdict",
    "Verifier",
    "align",
    "box_content",
    "find_boxes",
    "last_box",
    "token_span",
]

# Lazy, so that a worker process and `python -m grail_lightning.answers` load only what they use (PEP 562).
_MODULE_OF = {
    "Alignment": "spans",
    "Box": "extract",
    "Conventions": "conventions",
    "Verdict": "verifier",
    "Verifier": "verifier",
    "align": "spans",
    "box_content": "extract",
    "find_boxes": "extract",
    "last_box": "extract",
    "token_span": "spans",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
