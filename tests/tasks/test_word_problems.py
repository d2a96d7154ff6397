"""Generated word problems: every worked solution is right, and splits are disjoint."""

import re

import pytest

from grail_lightning.tasks import WordProblemSpace

SPACE = WordProblemSpace(max_steps=4, operators="+-*")


def test_every_line_of_a_solution_is_right_and_follows_from_the_line_before():
    for row in SPACE.sample(500, "train"):
        *lines, last = row["solution"].split("\n")
        total = int(re.search(r"has (\d+)", row["problem"])[1])
        for line in lines:
            a, sign, b, c = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", line).groups()
            assert int(a) == total
            total = {"+": total + int(b), "-": total - int(b), "*": total * int(b)}[sign]
            assert int(c) == total > 0
            assert re.search(rf"\b{b}\b", row["problem"])
        assert last == f"#### {total}"
        assert row["answer"] == str(total)
        assert row["steps"] == len(lines)


def test_draws_are_reproducible_and_splits_have_nothing_in_common():
    drawn = {split: [row["problem"] for row in SPACE.sample(300, split)] for split in ("train", "validation", "test")}
    assert drawn["train"] == [row["problem"] for row in SPACE.sample(300, "train")]
    assert drawn["train"] != [row["problem"] for row in SPACE.sample(300, "train", seed=1)]
    assert len({problem for problems in drawn.values() for problem in problems}) == 900


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_steps": 3, "max_steps": 2}, "1 <= min_steps <= max_steps <= 10"),
        ({"largest": 1}, "`largest` must lie between 3 and"),
        ({"operators": "+/"}, r"`operators` must be some of \+, - and \*"),
        ({"operators": ""}, "`operators` must be some of"),
    ],
)
def test_a_space_that_cannot_be_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        WordProblemSpace(**options)


def test_more_problems_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="hardly has 100000 different problems"):
        WordProblemSpace(max_steps=1, largest=3, operators="*").sample(100_000, "test")
