"""A model's answer: where it stands in the text, which tokens carry it, and whether it is right. Imports no torch.

`find` and `spans` locate an answer and its tokens. `normalise`, `parse` and `structure` read it. `wording`, `values`,
`external`, `compare` and `judge` decide whether two are equal. `worker`, `pool` and `verifier` grade many in processes
that can be killed. Each imports from those before it only.
"""

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
