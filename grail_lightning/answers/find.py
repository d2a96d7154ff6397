r"""Where a response states its answer: a box, its last number, a marker, or a pattern of the user's.

Each form finds the ranges of characters of all answers in a text. The last one is graded, and its tokens are the
answer's tokens for credit. Every search takes time linear in the text, or a bounded time (`Pattern`).
"""

import logging
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import regex

from grail_lightning.answers.records import AnswerSpan

# Digits inside a word, an index, an exponent or a version (`x2`, `a_{1}`, `10^-6`, `v1.2`) are no number of their own.
_NUMBER = re.compile(
    r"(?<![\w.^])(?<!\^[-\u2212])"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+|/\d+)?|\.\d+)"
)
_SCRIPT = re.compile(r"[_^]\{[^{}]*\}")
# A minus sign is an operator directly behind an operand (`5-3`). Before a space it is a sign behind `=`, `:` and such
# alone (`x = - 3`): elsewhere an operator (`5 - 3`), a bullet or a dash.
_SIGN = re.compile(
    r"(?<![\w)\]}])([-\u2212][$\u20ac\u00a3]?)\Z"
    r"|(?:[=:,(\[{<>\u2248\u2264\u2265\u2192]\ *|[$*\"'|\u201c])([-\u2212]\ )\Z"
)
_ENDING = re.compile(r"^####[ \t]*(.+)\Z", re.MULTILINE)
# The tags around the thinking of a model. The first may stand in the prompt.
_THINKING, _THOUGHT = "<think>", "</think>"
_PATTERN_SECONDS = 1.0
_log = logging.getLogger(__name__)


class AnswerForm(ABC):
    """A form in which a response states its answer.

    Attributes:
        evaluated: Whether an answer that could still be carried out, such as `7+5` for 12, is not right
            (`grail_lightning.answers.evaluated`). Published graders accept such answers, and a policy learns to copy
            the problem.
        in_thinking: Whether an answer counts that stands in the thinking alone: before the last `</think>`, or behind a
            `<think>` that does not end. A form with the default False looks behind the thinking.
    """

    evaluated: bool = False
    in_thinking: bool = False

    @property
    @abstractmethod
    def instruction(self) -> str:
        """The sentence, with a leading space, that asks for this form after a problem."""

    @abstractmethod
    def find(self, text: str) -> list[AnswerSpan]:
        """The answers of a text in order of appearance; the last one is graded."""

    def searched(self, text: str) -> tuple[int, int]:
        """The range of a response in which answers count: what is not thinking, or all of it with `in_thinking`."""
        if self.in_thinking:
            return 0, len(text)
        closing, opening = text.rfind(_THOUGHT), text.rfind(_THINKING)
        return max(0, closing + len(_THOUGHT)) if closing >= 0 else 0, opening if opening > closing else len(text)

    def last(self, text: str) -> str | None:
        """The content of the last answer, without outer white space; None if there is none."""
        spans = self.find(text)
        return text[spans[-1].content_start : spans[-1].content_stop].strip() if spans else None

    def bare(self, reference: str) -> str:
        r"""The answer alone, if the reference is a worked solution: its last box, or what ends it after `####` (GSM8K).

        A form that marks answers in another way reads its own mark first.
        """
        ending = _ENDING.search(reference.rstrip())
        return box_content(reference) or (ending[1] if ending else reference)


@dataclass(frozen=True)
class LastNumber(AnswerForm):
    """The last number of a response, such as `7`, `-3`, `1,250.5` or `3/4`.

    A minus sign may be an operator, a bullet or a dash: the last number of `5-3`, of `5 - 3` and of a line `- 3` is 3,
    that of `x = -3` and of `x = - 3` is -3.

    Args:
        in_thinking: Whether a number in the thinking alone counts; see `Boxed`.
    """

    in_thinking: bool = False
    instruction = " Please reason step by step, and end with the answer as a number."

    def find(self, text: str) -> list[AnswerSpan]:
        """See `AnswerForm`."""
        numbers, plain = [], _SCRIPT.sub(lambda script: "x" * len(script[0]), text)
        for match in _NUMBER.finditer(plain, *self.searched(text)):
            start, stop = match.span()
            sign = _SIGN.search(text[max(0, start - 16) : start])
            start -= len(sign[1] or sign[2]) if sign else 0
            numbers.append(AnswerSpan(start=start, stop=stop, content_start=start, content_stop=stop))
        return numbers


@dataclass(frozen=True)
class Marker(AnswerForm):
    """What follows a marker, to the end of its line or of the response: `7` in `#### 7` or in `Answer: 7`.

    White space and asterisks around the answer (`**Answer:** 7`) are left out. A marker without anything behind it is
    no answer. If a reference contains the marker, only what follows it is the reference answer.

    Args:
        marker: The marker, upper and lower case distinguished.
        to_end: Whether the answer goes on to the next marker or the end of the response, over several lines: a program.
        evaluated: Whether `7+5` is not right for 12; see `Boxed`.
        in_thinking: Whether a marker in the thinking alone counts; see `Boxed`.
    """

    marker: str = "####"
    to_end: bool = False
    evaluated: bool = False
    in_thinking: bool = False

    def __post_init__(self) -> None:
        if not self.marker.strip() or "\n" in self.marker:
            raise ValueError(f"`marker` must be visible text of one line, such as '####', but got {self.marker!r}.")

    @property
    def instruction(self) -> str:
        """A sentence that names the marker."""
        place = "" if self.to_end else "on a last line "
        return f" Please reason step by step, and put your final answer {place}after {self.marker}"

    def find(self, text: str) -> list[AnswerSpan]:
        """See `AnswerForm`."""
        answers = []
        marker, within = re.escape(self.marker), r"[\s\S]" if self.to_end else r"[^\n]"
        expression = re.compile(rf"{marker}((?:(?!{marker}){within})*)")  # to the next marker or the line's end
        for match in expression.finditer(text, *self.searched(text)):
            if content := match[1].strip("* \t\r\f\v\u00a0" + "\n" * self.to_end):
                first = match.start(1) + match[1].index(content)
                last = first + len(content)
                answers.append(AnswerSpan(start=match.start(), stop=last, content_start=first, content_stop=last))
        return answers

    def bare(self, reference: str) -> str:
        """See `AnswerForm`."""
        return self.last(reference) or super().bare(reference)


@dataclass(frozen=True)
class Pattern(AnswerForm):
    r"""What a regular expression matches, such as `answer is (\d+)`.

    The answer is the group named `answer`; without one the first group; without groups the whole match. The last match
    counts. The expression has one second for a response. A response that takes longer has no answer, and the first one
    is logged: such an expression backtracks without bound and has to be rewritten.

    Args:
        pattern: The expression, in the syntax of Python's `re` with the extensions of the package `regex`.
        evaluated: Whether `7+5` is not right for 12; see `Boxed`.
        in_thinking: Whether a match in the thinking alone counts; see `Boxed`.
    """

    pattern: str
    evaluated: bool = False
    in_thinking: bool = False
    instruction = ""  # A pattern cannot be put into words: the task needs an `instruction` that asks for it.

    def __post_init__(self) -> None:
        try:
            regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"`pattern` must be a regular expression, but got {self.pattern!r}: {error}.") from None
        if not self.pattern:
            raise ValueError("`pattern` must be a regular expression, but got an empty text.")

    def find(self, text: str) -> list[AnswerSpan]:
        """See `AnswerForm`."""
        expression = regex.compile(self.pattern)  # from the cache of `regex`
        group: str | int = "answer" if "answer" in expression.groupindex else min(1, expression.groups)
        answers = []
        try:
            for match in expression.finditer(text, *self.searched(text), timeout=_PATTERN_SECONDS):
                first, last = match.span(group)
                if first < last:
                    start, stop = match.span()
                    answers.append(AnswerSpan(start=start, stop=stop, content_start=first, content_stop=last))
        except TimeoutError:
            _warn_slow(self.pattern)
            return []
        return answers


@cache  # Once for each pattern.
def _warn_slow(pattern: str) -> None:
    _log.warning(
        "The answer pattern %r took more than %g s for a response, which therefore has no answer. Rewrite it so that "
        "it cannot match a text in exponentially many ways.",
        pattern,
        _PATTERN_SECONDS,
    )


_FENCE = re.compile(r"^[ \t]*(`{3,})[^\n`]*$", re.MULTILINE)


@dataclass(frozen=True)
class Fenced(AnswerForm):
    """The content of the last complete block between two lines of backticks, three or more, such as a program.

    Args:
        evaluated: Whether `7+5` is not right for 12; see `Boxed`. It has no effect on programs.
        in_thinking: Whether a block in the thinking alone counts; see `Boxed`.
    """

    evaluated: bool = False
    in_thinking: bool = False
    instruction = " Please reason step by step, and put the answer into one last block between ```python and ```."

    def find(self, text: str) -> list[AnswerSpan]:
        """See `AnswerForm`."""
        answers, opening = [], None
        for fence in _FENCE.finditer(text, *self.searched(text)):
            if opening is not None and fence[0].strip() == fence[1] >= opening[1]:
                first = min(opening.end() + 1, fence.start())
                inside = {"content_start": first, "content_stop": max(first, fence.start() - 1)}
                answers.append(AnswerSpan(start=opening.start(), stop=fence.end(), **inside))
                opening = None
            elif opening is None:
                opening = fence
        return answers


_TOKEN = re.compile(r"\\(?:(?P<box>boxed\s*\{)|[a-zA-Z]+|.)|[{}]", re.DOTALL)
Box = AnswerSpan


@dataclass(frozen=True)
class Boxed(AnswerForm):
    r"""The content of the last complete `\boxed{...}`, unless another box behind it is cut off.

    Args:
        evaluated: Whether an answer is not right that could still be carried out, such as `7+5` for 12 or
            `\int_0^1 x^2\,dx` for 1/3, where the reference is a rational number. Its status is then `unevaluated`.
        in_thinking: Whether a box in the thinking alone counts. By default everything before the last `</think>` is
            thinking, also without an opening tag, and everything behind a `<think>` that does not end. Graders of
            published protocols take the last box of the whole response.
    """

    evaluated: bool = False
    in_thinking: bool = False
    instruction = r" Please reason step by step, and put your final answer within \boxed{}."  # as in the published runs

    def find(self, text: str) -> list[AnswerSpan]:
        """See `AnswerForm`."""
        boxes, cut_off = _boxes(text, *self.searched(text))
        return [] if cut_off >= (boxes[-1].stop if boxes else 0) else boxes


def find_boxes(text: str) -> list[Box]:
    r"""The complete outermost boxes of a text, in order of appearance.

    A box inside a complete box is part of that box's content; a box inside an *incomplete* one
    (`\boxed{so \boxed{3}`) stands for itself.
    """
    return _boxes(text, 0, len(text))[0]


def _boxes(text: str, start: int, stop: int) -> tuple[list[Box], int]:
    """The complete outermost boxes of a range, and where the last box begins that is not closed; -1 if all are."""
    open_braces: list[tuple[int, int] | None] = []  # (start, content_start) of a box, None of another group
    boxes: list[Box] = []
    for token in _TOKEN.finditer(text, start, stop):
        if token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (opening := open_braces.pop()) is not None:
            while boxes and boxes[-1].start > opening[0]:  # boxes close inside out: those after our start lie within
                boxes.pop()
            box = Box(start=opening[0], stop=token.end(), content_start=opening[1], content_stop=token.start())
            boxes.append(box)
    return boxes, max((opening[0] for opening in open_braces if opening is not None), default=-1)


def last_box(text: str) -> Box | None:
    """The last complete outermost box, or None: the one that is graded."""
    return next(reversed(find_boxes(text)), None)


def box_content(text: str) -> str | None:
    """What stands in the last complete box, without outer white space; None without one, or if another is cut off."""
    return Boxed(in_thinking=True).last(text)
