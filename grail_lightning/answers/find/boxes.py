r"""Where a model put its answer: complete, balanced `\boxed{...}` in a text, as character ranges.

The text is read as TeX reads it, one token after the other: a backslash takes a whole command name or one other
character with it. So `\{` and `\}` do not count for the balance, `\\boxed{` is a line break followed by letters, and
`\fbox{...}` is no box. `\boxed {7}` (space before the brace) is a box, `\boxed7` is not: a group is asked for.
Every function is linear in the length of the text, whatever the braces do.
"""

import re

from grail_lightning.answers.find.forms import AnswerForm, AnswerSpan

__all__ = ["Box", "Boxed", "box_content", "find_boxes", "last_box"]

_TOKEN = re.compile(r"\\(?:(?P<box>boxed\s*\{)|[a-zA-Z]+|.)|[{}]", re.DOTALL)


Box = AnswerSpan


class Boxed(AnswerForm):
    r"""The content of the last complete `\boxed{...}`. A reference with a box is replaced by the box's content."""

    @property
    def instruction(self) -> str:
        """See `AnswerForm`. This is the prompt of the published runs."""
        return r" Please reason step by step, and put your final answer within \boxed{}."

    def find(self, text: str) -> list[AnswerSpan]:
        """See `AnswerForm`."""
        return find_boxes(text)

    def bare(self, reference: str) -> str:
        """See `AnswerForm`."""
        return self.last(reference) or reference


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
    return next(reversed(find_boxes(text)), None)


def box_content(text: str) -> str | None:
    """What stands in the last complete box, without outer white space, or None where there is no box."""
    return Boxed().last(text)
