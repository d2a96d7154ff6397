"""Forms of answers: which ranges of a text are answers."""

import time
from functools import partial

import pytest

from grail_lightning.answers import (
    AnswerSpan,
    Boxed,
    Fenced,
    LastNumber,
    Marker,
    Pattern,
    box_content,
    find_boxes,
    last_box,
)


def contents(form, text):
    return [text[found.content_start : found.content_stop] for found in form.find(text)]


NUMBERS = {
    "4 + 3 = 7": ["4", "3", "7"],
    "5-3": ["5", "3"],
    "5 - 3": ["5", "3"],
    "x = -3": ["-3"],
    "x=-3": ["-3"],
    "(-4)": ["-4"],
    "It is 1.5e3, or 5E-3.": ["1.5e3", "5E-3"],
    "a) -3": ["-3"],
    "the loss is \u22127.5 dollars": ["\u22127.5"],
    "It costs $1,250.50.": ["1,250.50"],
    "-$5": ["-$5"],
    "3/4 of it": ["3/4"],
    "1,234,567": ["1,234,567"],
    "1,2,3": ["1", "2", "3"],
    "x2, a_1, 10^6": ["10"],
    "72 m^{2}, x_{10}, s^{-1}, 2^-3, 10^{1,000} - 5, 8^{3/2}": ["72", "2", "10", "5", "8"],
    ".5": [".5"],
    "7apples": ["7"],
    "x = - 3": ["- 3"],
    "The answer is: - 3": ["- 3"],
    "The answer is $- 3$, **- 4**, (2, - 5) or x =  - 6": ["- 3", "- 4", "2", "- 5", "- 6"],
    "Final answer:\n- 3": ["3"],
    "**Answer** - 3": ["3"],
    "none": [],
    "": [],
}
MARKED = {
    "4 + 3 = 7\n#### 7": ["7"],
    "#### 7 apples \nand more": ["7 apples"],
    "**Answer** #### **7**": ["7"],
    "#### 7 #### 8": ["7", "8"],
    "#### 7\n####": ["7"],
    "####\n7": [],
    "no marker": [],
}
TO_END = {
    "So: [BEGIN]\nx = 1\n  y\n": ["x = 1\n  y"],
    "[BEGIN] a\n[BEGIN]b\nc": ["a", "b\nc"],
    "[BEGIN]\n": [],
}
FENCED = {
    "So:\n```python\nx = 1\n```\nDone": ["x = 1"],
    "```\na\n\n  b\n```\n  ```py\nc\n  ```": ["a\n\n  b", "c"],
    "```python\nprint('```')\n```python\n```": ["print('```')\n```python"],  # A closing line has no word.
    "```\n```": [""],
    "```python\nx = 1": [],  # It was cut.
    "x ``` y ```": [],
    "````md\n```python\nx = 1\n```\n````": ["```python\nx = 1\n```"],
}
FORMS = [(LastNumber(), NUMBERS), (Marker(), MARKED), (Marker("[BEGIN]", to_end=True), TO_END), (Fenced(), FENCED)]
SENTENCE = "The answer is 3, no, the answer is 4. The result is 5."
PATTERNS = {
    r"answer is (\d+)": ["3", "4"],
    r"(answer|result) is (?P<answer>\d+)": ["3", "4", "5"],
    r"\d+": ["3", "4", "5"],
    r"answer is(x*)": [],
}
FORMS += [(Pattern(pattern), {SENTENCE: answers}) for pattern, answers in PATTERNS.items()]


@pytest.mark.parametrize(("form", "texts"), FORMS)
def test_a_form_finds_its_answers_in_order(form, texts):
    assert {text: contents(form, text) for text in texts} == texts
    assert [form.last(text) for text in texts] == [answers[-1] if answers else None for answers in texts.values()]


def test_the_range_of_a_marked_answer_begins_with_the_marker():
    text = "So:\n#### 12\nDone"
    (found,) = Marker().find(text)
    assert (text[found.start : found.stop], text[found.content_start : found.content_stop]) == ("#### 12", "12")


def test_a_pattern_that_backtracks_without_bound_ends_in_time(caplog, monkeypatch):
    monkeypatch.setattr("grail_lightning.answers.find._PATTERN_SECONDS", 0.1)
    start = time.process_time()  # The limit is one of processor time; other processes do not count.
    form = Pattern(r"(?:a|a|aa)+$")
    assert form.find("a" * 2000 + "b") == []
    assert form.find("a" * 2001 + "b") == []
    assert time.process_time() - start < 10
    assert caplog.text.count("Rewrite it so that it cannot match a text in exponentially many ways") == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern("("), r"`pattern` must be a regular expression, but got '\('"),
        (lambda: Pattern(""), "`pattern` must be a regular expression, but got an empty text"),
        (lambda: Marker("  "), "`marker` must be visible text of one line"),
        (lambda: Marker("a\nb"), "`marker` must be visible text of one line"),
    ],
)
def test_a_form_that_cannot_be_found_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_references_lose_what_marks_them():
    assert Marker().bare("Natalia sold 48/2 = 24.\n#### 72") == "72"
    assert Boxed().bare(r"So it is \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert Marker().bare("72") == Boxed().bare("72") == LastNumber().bare("72") == "72"
    assert LastNumber().bare("x = 72 or 73") == "x = 72 or 73"  # A formula is not cut down to a number.
    assert Marker().bare("#### 72 boxes\nare right") == "72 boxes"
    assert Boxed().bare("#### 72 boxes\nare right") == "#### 72 boxes\nare right"  # Not on the last line.


@pytest.mark.parametrize("form", [Boxed(), LastNumber(), Marker(), Marker("Answer:"), Pattern(r"is (\d+)")])
@pytest.mark.parametrize("solution", ["Natalia sold 48/2 = <<48/2=24>>24.\n#### 72\n", r"Thus it is \boxed{72}."])
def test_the_answer_of_a_worked_solution_is_found_whatever_the_form_of_responses(form, solution):
    assert form.bare(solution) == "72"


@pytest.mark.parametrize(
    "form", [LastNumber(), Marker(), Marker(to_end=True), Boxed(), Fenced(), Pattern(r"#### (\S+)")]
)
def test_hostile_texts_take_linear_time_and_ranges_lie_inside(form):
    pieces = ["#### 7 ", "-", "1,", "1", "####", "*", " ", "{", "}", "\\", "$-", "1/", "```\n", r"\boxed{"]
    texts = [piece * (50_000 // len(piece)) for piece in pieces]
    texts += [r"\boxed{" * 20_000 + "}" * 20_000, r"\boxed" + " " * 50_000]
    for text in texts:
        start = time.thread_time()
        found = form.find(text)
        assert time.thread_time() - start < 2  # Quadratic would be more than that.
        for span in found:
            assert isinstance(span, AnswerSpan)
            assert 0 <= span.start <= span.content_start <= span.content_stop <= span.stop <= len(text)


BOXES = {
    r"so \boxed{17}.": ["17"],
    "\\boxed {5}": ["5"],
    # A box inside of a box is part of it; inside of an incomplete one it stands for itself.
    r"\boxed{1+\boxed{2}} and \boxed{3}": [r"1+\boxed{2}", "3"],
    r"\boxed{\boxed{1}\boxed{2}}": [r"\boxed{1}\boxed{2}"],
    r"\boxed{so \boxed{3} and": ["3"],
    # Braces of commands count, escaped ones do not; `\\` is one token.
    r"\boxed{\frac{1}{\sqrt{2}}}": [r"\frac{1}{\sqrt{2}}"],
    r"\boxed{\{1, 2\}}": [r"\{1, 2\}"],
    r"\boxed{\left\{1}": [r"\left\{1"],
    r"\boxed{a\\{b}}": [r"a\\{b}"],
    r"x\\\boxed{4}": ["4"],
    r"\\boxed{4}": [],
    r"}} \boxed{1} }": ["1"],
    r"\boxed{}": [""],
    r"\boxed{1} then \boxed{ 2 } then \boxed{3": ["1", " 2 "],
}
INCOMPLETE = ["", r"\boxed", r"\boxed7", r"\fbox{2}", r"\boxedfoo{2}", r"\boxed{2", r"\boxed}{", "\\", r"{\boxed{"]
BOXES |= {text: [] for text in INCOMPLETE}


@pytest.mark.parametrize("text", BOXES)
def test_boxes_are_complete_and_the_last_one_is_the_answer(text):
    boxes = find_boxes(text)
    assert [text[box.content_start : box.content_stop] for box in boxes] == BOXES[text]
    assert all(text[box.start :].startswith("\\boxed") and text[box.stop - 1] == "}" for box in boxes)
    assert last_box(text) == (boxes[-1] if boxes else None)
    assert box_content(text) == (BOXES[text][-1].strip() if boxes and text not in CUT_OFF else None)


CUT_OFF = [r"\boxed{1} then \boxed{ 2 } then \boxed{3"]
THINKING = {
    # text: what counts by default, and with `in_thinking`
    r"<think>so \boxed{4}</think> It is \boxed{5}.": (r"5", "5"),
    r"<think>so \boxed{4}</think> It is five.": (None, "4"),
    r"so \boxed{4}</think> It is five.": (None, "4"),  # the prompt opened the block
    r"so \boxed{4}</think>\boxed{5}": ("5", "5"),
    r"<think>so \boxed{4}": (None, "4"),  # cut off while it thought
    r"<think>a</think>\boxed{4}<think>\boxed{5}": ("4", "5"),
    r"<think>a</think>\boxed{4}<think>\boxed{5}</think>\boxed{6": (None, None),
    r"\boxed{42} and \boxed{43": (None, None),
    r"\boxed{42} and \boxed{4\boxed{3}": ("3", "3"),  # the inner box stands for itself
    r"<think>\boxed{1</think> \boxed{2}": ("2", "2"),
    r"\boxed{2}": ("2", "2"),
}


@pytest.mark.parametrize("text", THINKING)
def test_a_box_in_the_thinking_counts_by_an_option_alone_and_one_that_is_cut_off_never(text):
    assert (Boxed().last(text), Boxed(in_thinking=True).last(text)) == THINKING[text]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (LastNumber, "{} 4 {} it is five"),
        (Marker, "{}\n#### 4\n{} it is five"),
        (partial(Pattern, r"is (\d+)"), "{} it is 4 {} it is five"),
        (Fenced, "{}\n```\n4\n```\n{} it is five"),
    ],
)
def test_no_form_finds_its_answer_in_the_thinking_unless_it_is_told_to(form, text):
    for closed in (text.format("<think>", "</think>"), text.format("", "</think>"), text.format("<think>", "")):
        assert (form().last(closed), form(in_thinking=True).last(closed)) == (None, "4")
    assert form().last(text.format("", "")) == "4"
    (span,) = form().find("<think>so</think>" + text.format("", ""))
    assert ("<think>so</think>" + text.format("", ""))[span.content_start : span.content_stop] == "4"
