"""A model's answer: where it stands in the text, which tokens carry it, and whether it is right. Imports no torch.

`find` and `spans` locate an answer and its tokens. `spellings`, `normalise`, `parse` and `structure` read it.
`wording`, `values`, `external`, `compare` and `judge` decide whether two are equal. `worker`, `pool` and `verifier`
grade many in processes that can be killed. Each imports from those before it only.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grail_lightning.answers.compare import Conventions
    from grail_lightning.answers.find import (
        AnswerForm,
        AnswerSpan,
        Box,
        Boxed,
        LastNumber,
        Marker,
        Pattern,
        box_content,
        find_boxes,
        last_box,
    )
    from grail_lightning.answers.judge import answer_classes, text_classes
    from grail_lightning.answers.spans import Alignment, align, token_span
    from grail_lightning.answers.verifier import Verdict, Verifier

__all__ = ["Alignment", "AnswerForm", "AnswerSpan", "Box", "Boxed", "Conventions", "LastNumber", "Marker", "Pattern"]
__all__ += ["Verdict", "Verifier", "align", "answer_classes", "box_content", "find_boxes", "last_box"]
__all__ += ["text_classes", "token_span"]

# Lazy, so that a worker process and `python -m grail_lightning.answers` load only what they use (PEP 562).
_MODULE_OF = {
    **dict.fromkeys(["answer_classes", "text_classes"], "judge"),
    "Conventions": "compare",
    **dict.fromkeys(["Box", "Boxed", "box_content", "find_boxes", "last_box"], "find"),
    **dict.fromkeys(["AnswerForm", "AnswerSpan", "LastNumber", "Marker", "Pattern"], "find"),
    **dict.fromkeys(["Alignment", "align", "token_span"], "spans"),
    **dict.fromkeys(["Verdict", "Verifier"], "verifier"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
