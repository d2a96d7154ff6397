"""Pairs of a reference and an answer, a line each: as models write them, and one notation after the other.

`everyday.jsonl` has answers as language models end their solutions; a `known_miss` is equal, but not accepted.
`notations.jsonl` has one answer in several notations, and wrong answers that look like it. `kinds.jsonl` has
pairs of each kind of form that graders are known to get wrong, right and wrong ones.
"""

import json
from pathlib import Path

import pytest

from tests.answers.test_judge import outcome

PAIRS = [
    json.loads(line)
    for name in ("everyday", "notations", "kinds")
    for line in (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("subject", sorted({pair["subject"] for pair in PAIRS}))
def test_answers_that_are_equal_are_right_and_near_misses_are_not(subject):
    expected = {
        (pair["reference"], pair["answer"]): pair["equal"] and "known_miss" not in pair
        for pair in PAIRS
        if pair["subject"] == subject
    }
    assert [pair for pair, equal in expected.items() if (outcome(*pair).status == "right") is not equal] == []


def test_what_is_known_to_be_missed_is_little():
    assert len(PAIRS) >= 2900
    assert sum("known_miss" in pair for pair in PAIRS) <= 1
