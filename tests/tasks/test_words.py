"""Word problems: their splits and worked solutions, and the labels of steps."""

import random
import re

import pytest

from grail_lightning.tasks import WordProblemSpace, WordProblemTask, word_demonstration

SPACE = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
PLAIN = WordProblemSpace(max_steps=4, operators="+-*")
TASK = WordProblemTask()
# 8+5 = 13; Ben's 13+4 = 17, where "fewer" suggests a minus sign; 17-9 = 8.
ROW = {
    "problem": "Anna has 8 coins. Anna finds 5 coins. Then Anna has 4 fewer coins than Ben. Ben loses 9. How many?",
    "solution": "Anna has 8+5=13 coins.\nBen has 13+4=17 coins.\nBen has 17-9=8 coins.\n#### 8",
    "answer": "8",
    "suggested": "+--",
}


def labels(text, row=ROW):
    """Each step as (its text, its kind, the text of its result)."""
    steps = TASK.label_steps(text, TASK.prompt(row))
    return [(text[s.start : s.stop], s.kind, None if s.result is None else text[slice(*s.result)]) for s in steps]


def kinds(text, row=ROW):
    return [kind for _, kind, _ in labels(text, row)]


# ---- problems


def test_every_line_of_a_solution_is_right_and_follows_from_the_line_before():
    for row in PLAIN.sample(500, "train"):
        *lines, last = row["solution"].split("\n")
        total = int(re.search(r"has (\d+)", row["problem"])[1])
        for line in lines:
            a, sign, b, c = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", line).groups()
            assert int(a) == total
            total = {"+": total + int(b), "-": total - int(b), "*": total * int(b)}[sign]
            assert int(c) == total > 0
            assert re.search(rf"\b{b}\b", row["problem"])
        assert (last, row["answer"], row["steps"]) == (f"#### {total}", str(total), len(lines))


def test_draws_are_reproducible_and_splits_have_nothing_in_common():
    drawn = {split: [row["problem"] for row in PLAIN.sample(300, split)] for split in ("train", "validation", "test")}
    assert drawn["train"] == [row["problem"] for row in PLAIN.sample(300, "train")]
    assert drawn["train"] != [row["problem"] for row in PLAIN.sample(300, "train", seed=1)]
    assert len({problem for problems in drawn.values() for problem in problems}) == 900


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_steps": 3, "max_steps": 2}, "1 <= min_steps <= max_steps <= 10"),
        ({"largest": 1}, "3 <= largest < 10\\^6, .*largest=1"),
        ({"operators": "+/"}, r"operators some of \+, - and \*"),
        ({"max_steps": 1, "largest": 3, "operators": "*"}, "hardly has 100000 different problems"),
    ],
)
def test_problems_that_cannot_be_drawn_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WordProblemSpace(**options).sample(100_000, "test")


def test_the_words_of_comparisons_mean_the_operation_of_the_solution():
    """Read anew from the text: who has how many, and the keyword's own operation; half of the keywords mislead."""
    compared = misled = steps = 0
    for problem in SPACE.draw(1000, "train"):
        first, *events, question = re.findall(r"[^.?]+[.?]", problem.text)
        owner, total = re.match(r"(\w+) has (\d+) ", first).groups()
        known = {owner: int(total)}
        for event, sign, hint in zip(map(str.strip, events), problem.chain.operators, problem.suggested, strict=True):
            steps, misled = steps + 1, misled + (sign != hint)
            match = re.fullmatch(r"(?:Then )?(\w+) has (\d+) (more|fewer) \w+ than (\w+)\.", event)
            number = int(re.search(r"\d+", event)[0])
            if match is None:
                known[owner] += number if sign == "+" else -number
                assert hint == sign
                continue
            compared += 1
            one, _, word, other = match.groups()
            assert hint == {"more": "+", "fewer": "-"}[word]
            change = number if word == "more" else -number
            assert (one in known) != (other in known), "exactly one of both is known"
            if other in known:
                owner, known[one] = one, known[other] + change
            else:
                owner, known[other] = other, known[one] - change
        assert question.strip() == f"How many {problem.items} does {owner} have now?"
        assert known[owner] == problem.chain.answer > 0
    assert compared / steps == pytest.approx(0.5, abs=0.04)
    assert misled / compared == pytest.approx(0.5, abs=0.05)


# ---- labels

LABELS = {
    "the worked solution is sound, in two steps a line": (
        ROW["solution"],
        [
            ("Anna has 8+", "sound", "+"),
            ("5=13 coins.", "sound", "13"),
            ("Ben has 13+", "sound", "+"),
            ("4=17 coins.", "sound", "17"),
            ("Ben has 17-", "sound", "-"),
            ("9=8 coins.", "sound", "8"),
        ],
    ),
    "the suggested operation is a misconception, and its result inherited": (  # 13-4 = 9, 9-9 = 0
        "Anna has 8+5=13 coins.\nBen has 13-4=9 coins.\nBen has 9-9=0 coins.\n#### 0",
        [
            ("Anna has 8+", "sound", "+"),
            ("5=13 coins.", "sound", "13"),
            ("Ben has 13-", "misconception", "-"),
            ("4=9 coins.", "inherited", "9"),
            ("Ben has 9-", "inherited", "-"),
            ("9=0 coins.", "inherited", "0"),
        ],
    ),
    "an operation that no word suggests is a slip": ("8*5=40", [("8*", "slip", "*"), ("5=40", "inherited", "40")]),
    "a miscopied total is a slip where it stands": ("9+5=14", [("9+", "slip", "9"), ("5=14", "inherited", "14")]),
    "so is a miscopied number": ("8+6=14", [("8+", "sound", "+"), ("6=14", "slip", "6")]),
    "an answer is a step only if it does not follow": (
        "8+5=13\n#### 13",
        [("8+", "sound", "+"), ("5=13", "sound", "13"), ("#### 13", "slip", "13")],
    ),
    "words are filler": (
        "Let me go on\n\nSo Anna has 8 + 5 = 13 coins, and",
        [
            ("Let me go on", "filler", None),
            ("So Anna has 8 +", "sound", "+"),
            (" 5 = 13 coins, and", "sound", "13"),
        ],
    ),
} | {
    f"{line} is no equation": (line, [(line, "slip", None)])
    for line in ("Anna has 13 coins.", "8+5", "8+5=13=13", "8++5=13", "8/5=1", "= 13")
}


@pytest.mark.parametrize("case", LABELS)
def test_each_step_is_labelled_where_its_error_shows(case):
    text, expected = LABELS[case]
    assert labels(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 8+5 carries: 13-10 = 3. Behind the slip 12, 12+4 = 16 is right in itself.
        ("8+5=3\n3+4=7\n7-9=-2\n#### -2", ["sound", "misconception", *["inherited"] * 4]),
        ("8+5=12\n12+4=16\n16-9=6", ["sound", "slip", "inherited", "inherited", "inherited", "slip"]),
        # A forgotten carry behind a wrong operation: 13-4 has none, so 3 is a slip.
        ("8+5=13\n13-4=3", ["sound", "sound", "misconception", "slip"]),
        # The due step is +4; "-" is what its words suggest, but the 9 is that of the step behind it.
        ("8+5=13\n13-9=4\n#### 4", ["sound", "sound", "slip", "slip"]),
        (ROW["solution"].replace("####", "8+1=9\n####"), ["sound"] * 6 + ["slip", "inherited"]),
        ("8+5=13\n#### 8", ["sound", "sound"]),
        ("8+5=12\n#### 7", ["sound", "slip"]),  # 12+4-9 = 7
    ],
)
def test_the_kinds_of_steps(text, expected):
    assert kinds(text) == expected


def test_labels_need_a_solution_that_is_a_chain_and_work_without_suggestions():
    without = {name: value for name, value in ROW.items() if name != "suggested"}
    assert kinds("8+5=13\n13-4=9", without) == ["sound", "sound", "slip", "inherited"]
    for solution in ("The answer is 8.", "8+5=13\n12+4=16\n#### 16", "8+5=14\n#### 14", ""):
        assert TASK.label_steps("8+5=13", TASK.prompt(ROW | {"solution": solution})) is None
    bare = {"problem": "Anna has 8 coins.", "answer": "8"}
    assert TASK.label_steps("8+5=13", TASK.prompt(bare)) is None


def test_demonstrated_mistakes_are_labelled_as_what_they_are():
    for seed, problem in enumerate(SPACE.draw(300, "train")):
        row, hints = problem.row(), [*zip(problem.chain.operators, problem.suggested, strict=True)]
        assert kinds(row["solution"], row) == ["sound"] * 2 * row["steps"]
        assert TASK.answer(row["solution"]) == TASK.prompt(row).reference == row["answer"]
        misled = labels(word_demonstration(problem, random.Random(seed), 0.0, 1.0, 0.3), row)
        steps = [(text, kind) for text, kind, _ in misled if kind != "filler"]
        assert [kind == "misconception" for text, kind in steps[::2]] == [sign != hint for sign, hint in hints]
        assert {kind for _, kind in steps} <= {"sound", "misconception", "inherited"}
        slipped = labels(word_demonstration(problem, random.Random(seed), 1.0, 0.0), row)
        assert [kind for _, kind, _ in slipped[1::2]] == ["slip"] * len(hints)
        assert {kind for _, kind, _ in slipped[::2]} <= {"sound", "inherited"}
