import time

import pytest

from grail_lightning.answers.find import Box, box_content, find_boxes, last_box


def pieces(text):
    return [(text[box.start : box.stop], text[box.content_start : box.content_stop]) for box in find_boxes(text)]


def test_a_box_is_found_with_its_content():
    assert find_boxes(r"so \boxed{17}.") == [Box(start=3, stop=13, content_start=10, content_stop=12)]


def test_a_nested_box_counts_as_its_outer_box():
    assert pieces(r"\boxed{1+\boxed{2}} and \boxed{3}") == [
        (r"\boxed{1+\boxed{2}}", r"1+\boxed{2}"),
        (r"\boxed{3}", "3"),
    ]


def test_two_boxes_in_one_box_count_as_one():
    assert pieces(r"\boxed{\boxed{1}\boxed{2}}") == [(r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}")]


def test_braces_of_commands_belong_to_the_content():
    assert pieces(r"\boxed{\frac{1}{\sqrt{2}}}")[0][1] == r"\frac{1}{\sqrt{2}}"


def test_escaped_braces_do_not_count_for_the_balance():
    assert pieces(r"\boxed{\{1, 2\}}")[0][1] == r"\{1, 2\}"
    assert pieces(r"\boxed{\left\{1}")[0][1] == r"\left\{1"


def test_a_brace_after_a_line_break_command_counts():
    # `\\` is one token, so the brace after it is a real one.
    assert pieces(r"\boxed{a\\{b}}")[0][1] == r"a\\{b}"


def test_a_line_break_before_the_box_is_no_part_of_it_and_two_backslashes_are_no_box():
    assert pieces(r"x\\\boxed{4}") == [(r"\boxed{4}", "4")]
    assert pieces(r"\\boxed{4}") == []


def test_space_before_the_brace_is_allowed():
    assert pieces("\\boxed {5}") == [("\\boxed {5}", "5")]


@pytest.mark.parametrize(
    "text", ["", r"\boxed", r"\boxed7", r"\fbox{2}", r"\boxedfoo{2}", r"\boxed{2", r"\boxed}{", "\\", r"{\boxed{"]
)
def test_what_is_no_complete_box_is_not_found(text):
    assert find_boxes(text) == []
    assert last_box(text) is None
    assert box_content(text) is None


def test_a_box_inside_an_incomplete_one_stands_for_itself():
    assert pieces(r"\boxed{so \boxed{3} and") == [(r"\boxed{3}", "3")]


def test_stray_closing_braces_do_no_harm():
    assert pieces(r"}} \boxed{1} }") == [(r"\boxed{1}", "1")]


def test_an_empty_box_is_a_box_with_empty_content():
    assert pieces(r"\boxed{}") == [(r"\boxed{}", "")]
    assert box_content(r"\boxed{ }") == ""


def test_the_last_box_is_the_last_complete_one():
    text = r"\boxed{1} then \boxed{ 2 } then \boxed{3"
    assert box_content(text) == "2"
    box = last_box(text)
    assert text[box.start : box.stop] == r"\boxed{ 2 }"


@pytest.mark.parametrize(
    "text",
    [
        "{" * 200_000,
        "}" * 200_000,
        "\\boxed{" * 100_000,
        "\\boxed{" * 50_000 + "}" * 50_000,
        "\\boxed" + " " * 200_000,
        "\\" * 200_001,
    ],
    ids=["opening", "closing", "open boxes", "nested boxes", "spaces", "backslashes"],
)
def test_hostile_text_takes_linear_time(text):
    start = time.perf_counter()
    find_boxes(text)
    assert time.perf_counter() - start < 5.0  # quadratic would be minutes
