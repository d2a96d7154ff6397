"""The records of answers: where one stands in a text, and what became of it. What is equal is the verifier's matter."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

ALTERNATIVE = " ‖ "
"""Stands between references of which each is right, where answers are compared as text."""

STATUSES = (
    "right",
    "wrong",
    "unevaluated",
    "missing",
    "capped",
    "unparseable",
    "timeout",
    "crashed",
    "unknown_tokens",
    "unscored",
)

UNSCORED = "unscored"
"""The status of what is neither right nor wrong, and in no accuracy: a judge was asked, but had no opinion."""

WITHOUT_VOTE = ("unevaluated", "unknown_tokens", UNSCORED)
"""The statuses whose answers have no vote in maj@k, although there is one: it may equal an answer that is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSpan:
    r"""An answer in a text: `text[start:stop]` with what marks it, `text[content_start:content_stop]` without.

    For `\boxed{7}` the content is `7`; for `#### 7` after the marker `####` it is `7`; for a last number both ranges
    are the same.

    Args:
        start: The index of the first character, of the backslash of a box or of the marker.
        stop: The index after the last character, such as the closing brace.
        content_start: The index of the first character of the answer itself.
        content_stop: The index after its last character.
    """

    start: int
    stop: int
    content_start: int
    content_stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one answer.

    Args:
        correct: whether the answer counts as the reference.
        status: One of `STATUSES`; all but `right` are not correct. `unevaluated`: equal to the reference, but to be
            carried out still, where the form of the answer does not allow that. `crashed`: a worker died or ran out of
            memory, or a layer has a bug (`Verifier.faults`). `unknown_tokens`: the policy sampled tokens that its
            tokenizer does not know, whatever the answer is. `unscored`: a rollout that is judged by a reward and has
            none; it is neither right nor wrong, and in no accuracy.
        layer: the layer that decided: string | number | structure | symbolic | math-verify | none.
        gold: the reference answer as given.
        prediction: the model's answer as given.
    """

    correct: bool
    status: str
    layer: str
    gold: str
    prediction: str

    @classmethod
    def missing(cls, gold: str) -> Self:
        """The verdict on a response without an answer."""
        return cls(correct=False, status="missing", layer="none", gold=gold, prediction="")

    @classmethod
    def of_text(cls, gold: str, prediction: str, *, ignore_case: bool, relaxed: bool = False) -> Self:
        """The verdict on an answer that is plain text: Unicode's compatible forms and runs of white space are equal.

        Any of the references between which `ALTERNATIVE` stands is right. If `relaxed`, a number is right that differs
        from one by at most 5 % of it.
        """
        right, *golds = (text_key(text, ignore_case=ignore_case) for text in (prediction, *gold.split(ALTERNATIVE)))
        if not right:
            return cls.missing(gold)
        correct = right in golds or (relaxed and any(_nearly(reference, right) for reference in golds))
        status = "right" if correct else "wrong"
        return cls(correct=correct, status=status, layer="string", gold=gold, prediction=prediction)


def _nearly(gold: str, prediction: str) -> bool:
    """ChartQA's relaxed accuracy of numbers, ``|p − g| ≤ 0.05·|g|``; a reference of 0 is compared as text."""

    def number(text: str) -> float:
        try:
            return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
        except ValueError:
            return math.nan

    reference = number(gold)
    return 0 < abs(reference) < math.inf and abs(number(prediction) - reference) <= 0.05 * abs(reference)


class AnswerVerifier(Protocol):
    """What compares mathematical answers with their references; `grail_lightning.answers.Verifier` is one."""

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict for each pair of a reference and a bare answer, in order."""

    def close(self) -> None:
        """End what it has started. It may be asked again, and then starts anew."""


def text_key(text: str, *, ignore_case: bool) -> str:
    """For equality of plain text: Unicode's compatible forms and runs of white space are the same."""
    plain = " ".join(unicodedata.normalize("NFKC", text).split())
    return plain.casefold() if ignore_case else plain
