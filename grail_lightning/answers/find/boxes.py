r"""Where a model put its answer: complete, balanced `\boxed{...}` in a text, as character ranges.

The text is read as TeX reads it, one token after the other: a backslash takes a whole command name or one other
character with it. So `\{` and `\}` do not count for the balance, `\\boxed{` is a line break followed by letters, and
`\fbox{...}` is no box. `\boxed {7}` (space before the brace) is a box, `\boxed7` is not: a group is asked for.
Every function is linear in the length of the text, whatever the braces do.
"""

import re
from dataclasses import dataclass

__all__ = ["Box", "box_content", "find_boxes", "last_box"]

_TOKEN = re.compile(r"\\(?:(?P<box>boxed\s*\{)|[a-zA-Z]+|.)|[{}]", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    r"""A complete `\boxed{...}`: `text[start:stop]`, and what its braces hold: `text[content_start:content_stop]`.

    Args:
        start: index of the backslash, in characters.
        stop: index after the closing brace.
        content_start: index after the opening brace.
        content_stop: index of the closing brace.
    """

    start: int
    stop: int
    content_start: int
    content_stop: int


def find_boxes(text: str) -> list[Box]:
    r"""The complete outermost boxes of a text, in order of appearance.

    A box inside a complete box is part of that box's content; a box inside an *incomplete* one
    (`\boxed{so \boxed{3}`) stands for itself.

    Args:
        text: any text.
    """
    open_braces: list[tuple[int, int] | None] = []  # (start, content_start) of a box, None of another group
    found: list[Box] = []
    for token in _TOKEN.finditer(text):
        if token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (opening := open_braces.pop()) is not None:
            while found and found[-1].start > opening[0]:  # boxes close inside out: those after our start lie within
                found.pop()
            box = Box(start=opening[0], stop=token.end(), content_start=opening[1], content_stop=token.start())
            found.append(box)
    return found


def last_box(text: str) -> Box | None:
    """The last complete outermost box, or None: the one that is graded."""
    boxes = find_boxes(text)
    return boxes[-1] if boxes else None


def box_content(text: str) -> str | None:
    """What stands in the last complete box, without outer white space, or None where there is no box."""
    box = last_box(text)
    return None if box is None else text[box.content_start : box.content_stop].strip()
