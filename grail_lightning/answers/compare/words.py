"""Whether two answers are the same words, and whether a text is words at all."""

import re

from grail_lightning.answers.grammar.kinds import Answer, Leaf, Words

__all__ = ["anagrams", "same_wording", "spelled_alike", "wordy"]

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WRAPPED_WORD = re.compile(r"\\text\{[^{}]*[A-Za-z]\.?[A-Za-z][^{}]*\}", re.ASCII)
_WORDING = re.compile(r"[A-Za-z0-9 ,.:;'!?/()-]+", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*")
_WORDY = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{4,}|\?|\"")


def same_wording(one: str, two: str, *, ignore_case: bool) -> bool:
    r"""Whether two answers without formulas are the same but for upright type around words, as `\text{June 20}`.

    Args:
        one: what `normalise` returned.
        two: likewise.
        ignore_case: whether words may differ in case; letters behind a digit are taken as they are.
    """
    if not (_WRAPPED_WORD.search(one) or _WRAPPED_WORD.search(two)):
        return False
    plain = [_plain(text) for text in (one, two)]
    if not all(map(_WORDING.fullmatch, plain)):
        return False
    if ignore_case and not re.search(r"[0-9] ?[A-Za-z]", plain[0] + "|" + plain[1]):
        plain = [text.lower() for text in plain]
    return plain[0] == plain[1]


def _plain(text: str) -> str:
    text = re.sub(r"\s+", " ", _TEXT.sub(r" \1 ", text))
    return re.sub(r" ?([,.:;!?/()-]) ?", r"\1", text).strip(' "').rstrip(".!")


def spelled_alike(one: Answer, two: Answer, *, ignore_case: bool) -> bool:
    """Whether one answer is words and the other the same letters without upright type: `odd` is no product then."""
    words, bare = (one, two) if isinstance(one, Words) else (two, one)
    if not isinstance(words, Words) or not isinstance(bare, Leaf) or not _LETTERS.fullmatch(bare.quantity.text):
        return False
    text = bare.quantity.text
    return words.exact.lower() == text.lower() if ignore_case else words.exact == text


def anagrams(one: str, two: str) -> bool:
    """Whether two texts are words of the same letters, which a letter that comes twice tells from products: `SAS`."""
    words = [text.lower() for text in (one, two) if text.isascii() and text.isalpha() and len(text) > 2]
    return len(words) == 2 and words[0] != words[1] and len(set(words[0])) < len(words[0])


def wordy(text: str) -> bool:
    """Whether a formula that cannot be read has words in it, which no mathematical library should see."""
    return bool(_WORDY.search(text))
