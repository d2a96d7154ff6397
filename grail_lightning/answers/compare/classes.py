"""Which answers of several samples are the same: the groups of a majority vote."""

from collections.abc import Sequence

from grail_lightning.answers.compare.conventions import Conventions
from grail_lightning.answers.compare.judge import judge
from grail_lightning.answers.grammar.normalise import capped, normalise, string_key, text_key

__all__ = ["answer_classes", "text_classes"]

_MOST_COMPARED = 64


def answer_classes(answers: Sequence[str | None], conventions: Conventions | None = None) -> list[int]:
    r"""A number for each answer, equal for answers that say the same; -1 for none.

    Answers are equal if they are after normalisation, or if the verifier's cheap layers (strings, numbers, structure)
    say so of the first answer of a class: `0.5`, `\frac12` and `1/2` are one class. The reference has no part in it,
    so right and wrong answers are grouped alike. The slow layers are not asked: `(x+1)^2` and `x^2+2x+1` are two
    classes. The text is never evaluated, and answers beyond the caps are compared as text.

    Args:
        answers: The bare answers of the samples of one problem; None or blank text is no answer.
        conventions: What counts as equal where people differ, and the caps; None for the defaults.

    >>> answer_classes(["1/2", None, "0.5", "2"])
    [0, -1, 0, 1]
    """
    rules = conventions or Conventions()
    limits = (rules.max_characters, rules.max_nesting, rules.max_digits)
    number_of: dict[str, int] = {}
    first: list[str] = []
    found = []
    for answer in answers:
        if answer is None or not answer.strip():
            found.append(-1)
            continue
        key = answer.strip() if capped(answer, *limits) else string_key(normalise(answer))
        if key not in number_of:
            compared = enumerate(first[:_MOST_COMPARED])
            number_of[key] = next((n for n, other in compared if _equal(other, answer, rules)), len(first))
            if number_of[key] == len(first):
                first.append(answer)
        found.append(number_of[key])
    return found


def text_classes(answers: Sequence[str | None], *, ignore_case: bool) -> list[int]:
    """The class of each answer, where answers are plain text and compared as `Verdict.of_text` compares them.

    Args:
        answers: The answers of the samples of one problem; None or blank text is no answer.
        ignore_case: Whether upper and lower case are the same.

    >>> text_classes(["Paris", None, "paris", "Rome"], ignore_case=True)
    [0, -1, 0, 1]
    """
    keys = [text_key(answer or "", ignore_case=ignore_case) for answer in answers]
    number_of: dict[str, int] = {}
    return [number_of.setdefault(key, len(number_of)) if key else -1 for key in keys]


def _equal(one: str, other: str, conventions: Conventions) -> bool:
    try:
        outcome = judge(one, other, conventions)
    except Exception:  # A bug of a layer, which `Verifier` reports; a vote does not end an evaluation.
        return False
    return outcome is not None and outcome.status == "right"
