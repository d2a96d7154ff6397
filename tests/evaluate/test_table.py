"""The table of an evaluation, from verdicts that are written down."""

import re

import pytest

from grail_lightning.evaluate.records import Problem, Sample, problems_of
from grail_lightning.evaluate.table import TableOptions, evaluation_table


def _sample(number, prediction):
    """A sample of one problem."""
    return Sample(
        dataset="d",
        problem="0",
        index=0,
        sample=number,
        prompt="",
        reference="",
        response="",
        prediction=prediction,
        correct=False,
        status="wrong",
        layer="none",
        num_tokens=1,
        finished=True,
        seed=0,
    )


def _problem(dataset, index, correct, votes=None, statuses=None, **columns):
    right = tuple(bool(value) for value in correct)
    return Problem(
        dataset=dataset,
        index=index,
        columns=columns,
        correct=right,
        statuses=tuple(statuses or ("right" if value else "wrong" for value in right)),
        lengths=tuple(10 if value else 30 for value in right),
        finished=tuple(status != "missing" for status in statuses or ["right"] * len(right)),
        votes=tuple(votes or (0 if value else 1 + k for k, value in enumerate(right))),
    )


def _rows(block):
    """The cells of a block by the name of the row; an interval belongs to its figure."""
    head, *lines = block.splitlines()
    columns = re.split(r"\s{2,}", head.strip())
    found = {}
    for line in lines:
        name, *cells = re.split(r"\s{2,}", line.strip())
        found[name] = dict(zip(columns, cells, strict=False))
    return found


# Two problems of "a": one with two of three right, which wins the vote, and one with one of three, where two samples
# agree on a wrong answer. One of "b": no sample has an answer.
PROBLEMS = [
    _problem("a", 0, (1, 1, 0), level=10),
    _problem("a", 1, (1, 0, 0), votes=(0, 1, 1), level=9, subject="algebra"),
    _problem("b", 0, (0, 0, 0), votes=(-1, -1, -1), statuses=("missing", "missing", "timeout")),
]


def test_figures_of_datasets_and_both_averages():
    blocks = evaluation_table(PROBLEMS, TableOptions(pass_at=(1, 2), maj_at=(1, 2, 3))).split("\n\n")
    rows = _rows(blocks[0])
    assert list(rows) == ["a", "b", "weighted by size", "simple average"]

    def figure(row, column):
        return float(rows[row][column].partition(" ")[0])

    assert figure("a", "acc@3") == 0.5
    assert figure("a", "pass@2") == pytest.approx((1 + 2 / 3) / 2, abs=5e-4)
    # Pairs: of the first problem one is right and two are drawn, of the second one is wrong and two are drawn.
    assert figure("a", "maj@2") == pytest.approx((2 / 3 + 1 / 3) / 2, abs=5e-4)
    assert figure("a", "maj@3") == 0.5
    assert figure("a", "maj@1") == 0.5
    assert figure("weighted by size", "acc@3") == pytest.approx(1 / 3, abs=5e-4)
    assert re.search(r"^simple average +0\.250 \[", blocks[0], re.M)
    assert rows["weighted by size"]["problems"] == "3"
    assert all(re.fullmatch(r"0\.\d{3} \[0\.\d{3}, [01]\.\d{3}\]", rows["a"][name]) for name in ("acc@3", "maj@2"))


def test_lengths_and_failures_have_intervals_and_both_averages():
    rows = _rows(evaluation_table(PROBLEMS, TableOptions()).split("\n\n")[1])
    figures = {name: {column: cell.partition(" ")[0] for column, cell in row.items()} for name, row in rows.items()}
    assert figures["a"] == {
        "mean tokens": "20.0",
        "of right": "10.0",
        "of wrong": "30.0",
        "truncated": "0.000",
        "no answer": "0.000",
        "grading errors": "0.000",
    }
    assert (rows["b"]["of right"], figures["b"]["no answer"], figures["b"]["grading errors"]) == ("-", "0.667", "0.333")
    assert figures["b"]["truncated"] == "0.667"
    assert list(rows) == ["a", "b", "weighted by size", "simple average"]
    assert figures["weighted by size"]["mean tokens"] == "23.3"
    assert figures["simple average"] == {
        "mean tokens": "25.0",
        "of right": "-",  # "b" has none
        "of wrong": "30.0",
        "truncated": "0.333",
        "no answer": "0.333",
        "grading errors": "0.167",
    }
    # Two problems with the mean lengths 50/3 and 70/3: Student's interval, t = 12.706, of 20 ± t · (20/3)/√2/√2 < 0.
    assert rows["a"]["mean tokens"] == "20.0 [0.0, 62.4]"
    assert rows["b"]["mean tokens"] == "30.0 [-, -]"  # One problem says nothing about others.
    # Wilson's interval of 0 in 2 for the truncated ones of "a": its upper limit is z²/(2 + z²).
    assert rows["a"]["truncated"] == "0.000 [0.000, 0.658]"
    assert all("[" in cell for row in rows.values() for cell in row.values() if cell != "-")


def test_the_table_says_what_its_brackets_are():
    assert evaluation_table(PROBLEMS, TableOptions(by=("level",))).endswith("\n\nIn brackets: 95 % intervals.")


def test_parts_by_column_stand_in_the_order_of_their_values():
    blocks = evaluation_table(PROBLEMS, TableOptions(by=("level", "subject", "nothing"), first={"a": 2})).split("\n\n")
    assert list(_rows(blocks[2])) == ["a (first 2), level 9", "a (first 2), level 10"]
    assert list(_rows(blocks[3])) == ["a (first 2), subject algebra"]
    assert blocks[4] == "No problem has a column 'nothing'."


@pytest.mark.parametrize(
    ("compare", "votes"), [("math", (0, 0, 1, -1)), ("text", (0, 1, 2, -1)), ("exact", (0, 1, 2, -1))]
)
def test_answers_vote_as_the_task_compares_them(compare, votes):
    samples = [_sample(number, text) for number, text in enumerate(("1/2", "0.5", "one", None))]
    assert problems_of(samples, compare)[0].votes == votes


def test_text_without_regard_to_case_is_one_vote():
    samples = [_sample(number, text) for number, text in enumerate(("Oslo", "oslo ", "Bergen"))]
    assert problems_of(samples, "text")[0].votes == (0, 0, 1)
    assert problems_of(samples, "exact")[0].votes == (0, 1, 2)
