r"""What answers are made of: formulas with their words, groups, lists, chains, words; and how a formula is read.

A formula without separators is an `Atom`: `3\text{ cm}`. Numbers in words, quotients in words, quantities of two units
and numbers of a base are read here, too.
"""

import re
from typing import NamedTuple

from grail_lightning.answers.lexicon import unit_name
from grail_lightning.answers.numerals import scaled, spelled
from grail_lightning.answers.parse import Node, Unreadable, number, parse, signed, subtrees
from grail_lightning.answers.quantity import NOTHING, Said, split_words, unwrapped

SET_SIGNS = frozenset([r"\cup", r"\cap", r"\setminus"])


class Atom(NamedTuple):
    """One formula (`text`) and what the words around it say; `node` is None if the grammar does not cover it.

    `whole` has the formula with its words as it was typed.
    """

    text: str
    said: Said = NOTHING
    node: Node | None = None
    whole: str = ""

    @property
    def percent(self) -> bool:
        """Whether it is a number of hundredths."""
        return self.said.kind == "%"

    @property
    def degrees(self) -> bool:
        """Whether it is an angle in degrees, or a temperature."""
        return self.said.kind.startswith("deg")


class Group(NamedTuple):
    """Ordered items and what holds them: two brackets, `:` a ratio, `&` a row, `matrix` and `determinant` rows."""

    brackets: str
    items: tuple["Answer", ...]


class Many(NamedTuple):
    """Several answers in no order; `braced` if written as a set, `joint` is `and`, `or` or a comma."""

    items: tuple["Answer", ...]
    braced: bool = False
    joint: str = ","


class Chain(NamedTuple):
    r"""Items with signs between them, such as `1<x\le 3` or `A\cup B`; `sources` are the items as text."""

    items: tuple["Answer", ...]
    signs: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def is_relation(self) -> bool:
        """Whether it is a statement, not a set."""
        return SET_SIGNS.isdisjoint(self.signs)


class Words(NamedTuple):
    """What is compared as text: words in lower case, and digits in a number base."""

    text: str


class Broken(NamedTuple):
    """An answer that cannot be read."""

    reason: str


Answer = Atom | Group | Many | Chain | Words | Broken

_BASE = re.compile(
    r"[{(]?([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)[})]?\s*(?:_\s*\{?\s*\(?\s*(?:\\text)?\{?\s*(?:base)?\s*\}?\s*([0-9]{1,2}|[a-z]+)\s*\)?\s*\}{0,2}"
    r"|(?:\\text\{\s*)?(?:in )?\(?\s?base\s*\}?\s*([0-9]{1,2}|[a-z]+)\s*\)?\}?)"
)
_PREFIXED = re.compile(r"0(?:[xX]([0-9A-Fa-f]{1,16})|b([01]{1,60})|o([0-7]{1,20}))", re.ASCII)
# The first digits of a number that goes on.
_CUT_OFF = re.compile(r"(?<=[0-9])\\ldots$")
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}\s+){2,}[A-Za-z]{2,}")


def atom_of(text: str) -> Answer:
    """A formula with its words; two of them if a plus-minus stands for both signs."""
    core, words = split_words(text)
    atom = Atom(core, words, whole=text)
    if _PROSE.search(atom.text):  # a sentence, not a product of its letters
        return atom
    try:
        node = parse(_CUT_OFF.sub("", atom.text))
    except Unreadable:
        return atom
    if all(part.kind != "sign" for part in subtrees(node)):
        return atom._replace(node=node)
    return Many(tuple(atom._replace(text=f"{atom.text}[{sign}]", node=signed(node, sign)) for sign in "+-"))


_FIRST_LETTER = re.compile(r"\s*(?:\\text\{\s*)?[A-Za-z]{3,}|\s*(?:\\text\{\s*)?[Aa]n? ")
_SIMPLE = r"(-?[0-9.]+|[a-z]|-?\\frac\{[^{}]*\}\{[^{}]*\})"
_BETWEEN = re.compile(rf"{_SIMPLE} (in|out of|over|to) {_SIMPLE}")
# With a number in words these are a statement about an equation: `two roots` is more than 2.
_STATED = ("root", "solution", "zero", "intersection")
_COMPOUND = re.compile(r"[0-9.]+ ?[A-Za-z]+\.?(?:,? ?(?:and )?[0-9.]+ ?[A-Za-z]+\.?)+")


def number_in_words(text: str) -> Answer | None:
    """A number in words. With a noun it is more than the bare number: `two roots`."""
    if not _FIRST_LETTER.match(text):
        return None
    plain = unwrapped(text).rstrip(".!")
    numeral = spelled(plain) if plain.isascii() and "\\" not in plain and not re.search("[0-9=<>]", plain) else None
    if numeral is None:
        return None
    number, rest = numeral
    if rest.startswith(("in ", "out of ", "over ", "to ")) and (
        second := spelled(rest.removeprefix("out ").split(" ", 1)[1])
    ):
        return (
            quotient_in_words(f"{number} {'to' if rest.startswith('to') else 'over'} {second[0]}")
            if not second[1]
            else None
        )
    if rest.startswith(("and ", "or ", "to ")):
        return None
    atom = atom_of(rf"{number}\text{{ {rest}}}" if rest else number)
    counted = isinstance(atom, Atom) and atom.said.kind.endswith(_STATED)
    return atom._replace(said=atom.said._replace(known=False)) if isinstance(atom, Atom) and counted else atom


_AND_PART = re.compile(r"([0-9]+) (and (?:an?|one|two|three|[0-9]+) [a-z]+.*)")


def quotient_in_words(text: str) -> Answer | None:
    """`1 in 6` and `7 over 2` are quotients, `1 to 2` is a ratio."""
    if "and" in text and (mixed := _AND_PART.fullmatch(unwrapped(text))) and (whole := scaled(mixed[1], mixed[2])):
        return atom_of(rf"{whole[0]}\text{{ {whole[1]}}}" if whole[1] else whole[0])
    match = _BETWEEN.fullmatch(unwrapped(text)) if re.search("in|o", text) else None
    if match is None:
        return None
    return (
        Group(":", (atom_of(match[1]), atom_of(match[3])))
        if match[2] == "to"
        else atom_of(rf"\frac{{{match[1]}}}{{{match[3]}}}")
    )


def compound(text: str) -> Answer | None:
    """`5 hours 3 minutes`: a list of its parts."""
    if not text[:1].isdigit() or (" " not in text.strip() and "text" not in text):
        return None
    plain = unwrapped(text).rstrip(".")
    if not _COMPOUND.fullmatch(plain):
        return None
    parts = re.findall(r"([0-9.]+) ?([A-Za-z]+)", plain)
    if len(parts) < 2 or not all(unit_name(word.lower()) for _, word in parts):
        return None
    return Many(tuple(atom_of(rf"{number}\text{{ {word}}}") for number, word in parts), joint="and")


def in_base(text: str) -> Answer | None:
    """Digits of a number base, `52_8`; a number as programs write it, `0xFF`."""
    if text[:1] == "0" and (literal := _PREFIXED.fullmatch(text)):  # `0xFF`: a number as programs write it
        base = 16 if literal[1] else 2 if literal[2] else 8
        return Atom(text, node=number(int(literal[1] or literal[2] or literal[3], base)), whole=text)
    digits = _BASE.fullmatch(re.sub(r"(?<=[0-9])\s+(?=[0-9])|\\text\{([A-Fa-f])\}", r"\1", text))
    if digits is None and "base" in text:
        digits = _BASE.fullmatch(unwrapped(text))
    if digits is None:
        return None
    base_text = digits[2] or digits[3]
    if not re.search("[0-9A-F]", digits[1]) and base_text != "16":
        return None
    spelled_base = None if base_text.isdigit() else spelled(base_text)
    if spelled_base is not None and not spelled_base[1]:
        base_text = spelled_base[0]
    if not base_text.isdigit():
        return None
    if base_text == "10" and digits[1].isdigit():
        return atom_of(digits[1])
    return Words(f"{digits[1].lstrip('0').lower() or '0'}_{base_text.lstrip('0')}")


def digits_of(literal: str) -> str:
    """`ff_16` for `0xFF`, as `in_base` reads `FF_{16}`; nothing for any other text."""
    base = {"0x": 16, "0b": 2, "0o": 8}.get(literal[:2].lower())
    return f"{literal[2:].lower().lstrip('0') or '0'}_{base}" if base and _PREFIXED.fullmatch(literal) else ""
