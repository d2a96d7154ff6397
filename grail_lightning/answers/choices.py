r"""Choices among options: `(B)`, `\text{Option B}`, `(B) 24`, `A and C`; and what a remark says against one."""

import re

# A choice, and behind it that it is right, or what is chosen, in which there is no second answer.
_CHOICE = re.compile(
    r"(?:\\text\{)?(?:(?:[Tt]he )?(?:[Cc]orrect |[Ff]inal |[Rr]ight )?(?:[Oo]ption|[Cc]hoice|[Aa]nswer):? ?(?:is:? )?)?"
    r"\(?([A-E])(?:[).:]|\}|(?= is )|$)\s*\}?\s*"
    r"(?:(?:\\text\{)?\s*is (?:correct|right|true|the (?:correct |right |best )?(?:answer|choice|option))\}?|"
    r"(?:(?!.*\bor\b|is\b)(?:[0-9]|\\\$|\\frac|\\sqrt|\\text\{[a-z ]|(?<= )[a-z]|(?<=\))[a-z]{3})[^A-Z(,;=]*)?)"
)
_CHOICES = re.compile(r"[A-E](?:,? ?[A-E]){1,4}")
_LABEL = re.compile(r"^\([A-E]\)(?=[0-9]|\\(?:\$|frac|sqrt|text))")
_SAID_RIGHT = r"(?:correct|right|true|the (?:correct |right |best |final )?(?:answer|choice|option|one))"
# What a remark behind a choice says against it, or leaves open.
_REJECTED = re.compile(
    r"\b(?:incorrect|wrong|false|invalid|impossible|eliminated|excluded|rejected|discarded|ruled|crossed|refuted|cannot"
    r"|not|never|maybe|perhaps|possibly|probably|unlikely|unless|except|doubtful|contradict\w*|fails?|out|neither|nor"
    r"|isn't|doesn't|can't)\b"
    rf"|(?:(?<=[)}}:.] )|(?<=text\{{)\s?)\w{{4,}}ed\}}?$|\b(?:is|are|was|seems|looks|has)\b(?! {_SAID_RIGHT})"
)


# `The correct option is C`: this `is` says nothing of a choice before it.
_CHOSEN = re.compile(
    r"^(?:\\text\{)?(?:[Tt]he )?(?:[Cc]orrect |[Ff]inal |[Rr]ight )?(?:[Oo]ption|[Cc]hoice|[Aa]nswer) is\b"
)


def _choice(prediction: str) -> str | None:
    match = None if _REJECTED.search(_CHOSEN.sub("", prediction)) else _CHOICE.fullmatch(prediction)
    return match[1] if match else None


def same_choice(gold: str, prediction: str) -> bool | None:
    """Whether two normalised answers choose the same options; None if one of them is no choice."""
    if re.fullmatch(r"\(?[A-E]\)?", gold):
        choice = _choice(prediction)
        return None if choice is None else choice == gold.strip("()")
    if "," in gold and _CHOICES.fullmatch(gold) and _CHOICES.fullmatch(prediction):
        gold_letters, prediction_letters = (sorted(re.findall("[A-E]", text)) for text in (gold, prediction))
        return gold_letters == prediction_letters
    return None


def without_label(gold: str, prediction: str) -> str:
    """`24` for `(B)24`, where the reference is no choice."""
    if not _LABEL.match(prediction):
        return prediction
    choice = _choice(prediction)
    return prediction if choice is None or choice in gold else _LABEL.sub("", prediction)
