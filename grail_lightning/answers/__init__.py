"""A model's answer: where it stands in the text, which tokens carry it, and whether it is right. Imports no torch.

Four packages, each of which imports from those before it only: `find` locates an answer, `grammar` reads it, `compare`
decides whether two are equal, `service` grades many in processes that can be killed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grail_lightning.answers.compare.classes import answer_classes, text_classes
    from grail_lightning.answers.compare.conventions import Conventions
    from grail_lightning.answers.find.boxes import Box, Boxed, box_content, find_boxes, last_box
    from grail_lightning.answers.find.forms import AnswerForm, AnswerSpan, LastNumber, Marker, Pattern
    from grail_lightning.answers.find.spans import Alignment, align, token_span
    from grail_lightning.answers.service.verifier import Verdict, Verifier

__all__ = ["Alignment", "AnswerForm", "AnswerSpan", "Box", "Boxed", "Conventions", "LastNumber", "Marker", "Pattern"]
__all__ += ["Verdict", "Verifier", "align", "answer_classes", "box_content", "find_boxes", "last_box"]
__all__ += ["text_classes", "token_span"]

# Lazy, so that a worker process and `python -m grail_lightning.answers` load only what they use (PEP 562).
_MODULE_OF = {
    **dict.fromkeys(["answer_classes", "text_classes"], "compare.classes"),
    "Conventions": "compare.conventions",
    **dict.fromkeys(["Box", "Boxed", "box_content", "find_boxes", "last_box"], "find.boxes"),
    **dict.fromkeys(["AnswerForm", "AnswerSpan", "LastNumber", "Marker", "Pattern"], "find.forms"),
    **dict.fromkeys(["Alignment", "align", "token_span"], "find.spans"),
    **dict.fromkeys(["Verdict", "Verifier"], "service.verifier"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
