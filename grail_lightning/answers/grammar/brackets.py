r"""Brackets: whether they match, where one closes, and what stands between separators outside of all of them."""

import re
from collections.abc import Collection, Iterator

__all__ = ["CLOSING", "TEXT", "balanced", "group_end", "pieces", "split"]

# Words in upright type, and what else `\text` holds.
TEXT = re.compile(r"\\text\{([^{}]*)\}")
_OPENING = frozenset(["(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"])
CLOSING = frozenset([")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"])
_PIECE = re.compile(r"\\text\{[^{}]*\}|\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
_COMMAND_OR_BRACKET = re.compile(r"\\(?:[a-zA-Z]+|.)|[{}()\[\]]", re.DOTALL)


def balanced(text: str) -> bool:
    r"""Whether braces nest, and the other brackets are as many open as closed (kinds may mix: `[0,1)`)."""
    depths = {True: 0, False: 0}  # of braces, and of the others
    for piece in _COMMAND_OR_BRACKET.findall(text):
        depths[piece in ("{", "}")] += (piece in _OPENING) - (piece in CLOSING)
        if min(depths.values()) < 0:
            return False
    return not any(depths.values())


def group_end(text: str, start: int) -> int:
    """Index after the brace that closes the one at `start`; -1 if none does."""
    depth = 0
    for found in _COMMAND_OR_BRACKET.finditer(text, start):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return found.end()
    return -1


def pieces(text: str) -> Iterator[tuple[int, str, int]]:
    r"""Tokens of a text with their place and the depth of brackets around them; `\text{...}` is one token."""
    depth = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        depth -= piece in CLOSING or piece.startswith(r"\end{")
        yield found.start(), piece, depth
        depth += piece in _OPENING or piece.startswith(r"\begin{")


def split(text: str, separators: Collection[str]) -> tuple[list[str], list[str]]:
    """Parts of a text between separators outside of all brackets, and the separators."""
    parts, found, start = [], [], 0
    for place, piece, depth in pieces(text):
        if depth == 0 and piece in separators:
            parts.append(text[start:place])
            found.append(piece)
            start = place + len(piece)
    return [*parts, text[start:]], found
