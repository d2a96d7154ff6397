"""A model's answer: where it stands in the text, which tokens carry it, and whether it is right. Imports no torch.

`records` holds an answer's place and its verdict. `find` and `spans` locate an answer and its tokens. `normalise`, with
`phrases` and `chinese`, makes spellings one. `parse` reads formulas, `quantity` the words around them by the lists of
`lexicon` and `numerals`, and `shapes` and `structure` the whole. `statements`, `values`, `library`, `relations`,
`named`, `choices`, `compare` and `judge` decide whether two are equal, `evaluated` whether one is worked out.
`verifier` grades many in processes that can be killed. Each imports from those before it only.
"""

from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.evaluated import unevaluated
from grail_lightning.answers.find import (
    AnswerForm,
    Box,
    Boxed,
    Fenced,
    LastNumber,
    Marker,
    Pattern,
    box_content,
    find_boxes,
    last_box,
)
from grail_lightning.answers.judge import answer_classes, text_classes
from grail_lightning.answers.records import AnswerSpan, AnswerVerifier, Verdict
from grail_lightning.answers.spans import Alignment, align, token_span
from grail_lightning.answers.verifier import Verifier

__all__ = ["Alignment", "AnswerForm", "AnswerSpan", "AnswerVerifier", "Box", "Boxed", "Conventions", "Fenced"]
__all__ += ["LastNumber", "Marker", "Pattern", "Verdict", "Verifier", "align", "answer_classes", "box_content"]
__all__ += ["find_boxes", "last_box", "text_classes", "token_span", "unevaluated"]
