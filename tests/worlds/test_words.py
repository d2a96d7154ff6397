"""Word problems: their splits and worked solutions, and the labels of steps."""

import random
import re

import pytest

from grail_lightning import WordProblemTask
from grail_lightning.worlds.words.task import WordProblemSpace, word_demonstration

SPACE = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
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
    return [(text[s.start : s.stop], s.kind, text[slice(*s.result)] if s.result else "") for s in steps]


def kinds(text, row=ROW):
    """The kind of each step and the text of its result."""
    return [f"{kind} {result}".strip() for _, kind, result in labels(text, row)]


# ---- problems


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


def test_a_line_has_two_steps_and_words_are_filler():
    text = "Let me go on\n\nSo Anna has 8 + 5 = 13 coins, and\nBen has 13-4=9 coins."
    assert labels(text) == [
        ("Let me go on", "filler", ""),
        ("So Anna has 8 +", "sound", "+"),
        (" 5 = 13 coins, and", "sound", "13"),
        ("Ben has 13-", "misconception", "-"),
        ("4=9 coins.", "inherited", "9"),
    ]


SOUND = ["sound +", "sound 13", "sound +", "sound 17", "sound -", "sound 8"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ROW["solution"], SOUND),
        # The suggested operation is a misconception, and what follows is inherited: 13-4 = 9, 9-9 = 0.
        (
            "8+5=13\n13-4=9\n9-9=0\n#### 0",
            ["sound +", "sound 13", "misconception -", "inherited 9", "inherited -", "inherited 0"],
        ),
        # An operation that no word suggests is a slip, and so is what is miscopied, where it stands.
        ("8*5=40", ["slip *", "inherited 40"]),
        ("9+5=14", ["slip 9", "inherited 14"]),
        ("8+6=14", ["sound +", "slip 6"]),
        # An answer is a step only if it does not follow: 12+4-9 = 7.
        ("8+5=13\n#### 13", ["sound +", "sound 13", "slip 13"]),
        ("8+5=13\n#### 8", ["sound +", "sound 13"]),
        ("8+5=12\n#### 7", ["sound +", "slip 12"]),
        # 8+5 carries: 13-10 = 3. Behind the slip 12, 12+4 = 16 is right in itself.
        ("8+5=3\n3+4=7", ["sound +", "misconception 3", "inherited +", "inherited 7"]),
        ("8+5=12\n12+4=16\n16-9=6", ["sound +", "slip 12", "inherited +", "inherited 16", "inherited -", "slip 6"]),
        # A forgotten carry behind a wrong operation: 13-4 has none, so 3 is a slip.
        ("8+5=13\n13-4=3", ["sound +", "sound 13", "misconception -", "slip 3"]),
        # The due step is +4; "-" is what its words suggest, but the 9 is that of the step behind it.
        ("8+5=13\n13-9=4\n#### 4", ["sound +", "sound 13", "slip -", "slip 9"]),
        (ROW["solution"].replace("####", "8+1=9\n####"), [*SOUND, "slip +", "inherited 9"]),
        *((line, ["slip"]) for line in ("Anna has 13 coins.", "8+5", "8+5=13=13", "8++5=13", "8/5=1", "= 13")),
    ],
)
def test_each_step_is_labelled_where_its_error_shows(text, expected):
    assert kinds(text) == expected


def test_labels_need_a_solution_that_is_a_chain_and_work_without_suggestions():
    without = {name: value for name, value in ROW.items() if name != "suggested"}
    assert kinds("8+5=13\n13-4=9", without) == ["sound +", "sound 13", "slip -", "inherited 9"]
    for solution in ("The answer is 8.", "8+5=13\n12+4=16\n#### 16", "8+5=14\n#### 14", "", None):
        assert TASK.label_steps("8+5=13", TASK.prompt(ROW | {"solution": solution})) is None


def test_demonstrated_mistakes_are_labelled_as_what_they_are():
    for seed, problem in enumerate(SPACE.draw(300, "train")):
        row, hints = problem.row(), [*zip(problem.chain.operators, problem.suggested, strict=True)]
        assert [kind for _, kind, _ in labels(row["solution"], row)] == ["sound"] * 2 * row["steps"]
        assert TASK.answer(row["solution"]) == TASK.prompt(row).reference == row["answer"]
        misled = labels(word_demonstration(problem, random.Random(seed), 0.0, 1.0, 0.3), row)
        steps = [(text, kind) for text, kind, _ in misled if kind != "filler"]
        assert [kind == "misconception" for text, kind in steps[::2]] == [sign != hint for sign, hint in hints]
        assert {kind for _, kind in steps} <= {"sound", "misconception", "inherited"}
        slipped = labels(word_demonstration(problem, random.Random(seed), 1.0, 0.0), row)
        assert [kind for _, kind, _ in slipped[1::2]] == ["slip"] * len(hints)
        assert {kind for _, kind, _ in slipped[::2]} <= {"sound", "inherited"}
