"""The table of an evaluation, from verdicts that are written down."""

import re

import pandas as pd
import pytest

from grail_lightning.app.results.records import sample_frame, with_votes
from grail_lightning.app.results.table import TableOptions, evaluation_table, parts_of
from tests.app.results.made import sample


def _problem(dataset, index, correct, votes=None, statuses=None, **columns):
    statuses = statuses or ["right" if value else "wrong" for value in correct]
    samples = [
        sample(
            dataset=dataset,
            index=index,
            sample=k,
            columns=columns,
            correct=bool(value),
            status=status,
            num_tokens=10 if value else 30,
            finished=status != "missing",
        )
        for k, (value, status) in enumerate(zip(correct, statuses, strict=True))
    ]
    votes = votes or [0 if value else 1 + k for k, value in enumerate(correct)]
    return sample_frame(samples, len(correct)).assign(vote=votes)


def _rows(block):
    """The cells of a block by the names of row and column; an interval belongs to its figure."""
    head, *lines = block.splitlines()
    columns = re.split(r"\s{2,}", head.strip())
    names, *cells = zip(*(re.split(r"\s{2,}", line.strip()) for line in lines if "simple" not in line), strict=True)
    table = {column: dict(zip(names, of, strict=True)) for column, of in zip(columns, cells, strict=True)}
    return {name: {column: of[name] for column, of in table.items()} for name in names}


# Two problems of "a": one with two of three right, which wins the vote, and one with one of three, where two samples
# agree on a wrong answer. One of "b": no sample has an answer.
PROBLEMS = pd.concat(
    [
        _problem("a", 0, (1, 1, 0), level=10),
        _problem("a", 1, (1, 0, 0), votes=(0, 1, 1), level=9, subject="algebra"),
        _problem("b", 0, (0, 0, 0), votes=(-1, -1, -1), statuses=("missing", "missing", "timeout")),
    ],
    ignore_index=True,
)


def test_figures_of_datasets_and_both_averages():
    block = evaluation_table(PROBLEMS, TableOptions(pass_at=(1, 2), maj_at=(1, 2, 3))).split("\n\n")[0]
    rows = _rows(block)
    assert list(rows) == ["a", "b", "weighted by size"]
    # Pairs of the first problem: one has two right ones, two are drawn, so that half of them win. Of the second one
    # two are drawn and one has two wrong ones.
    known = {"acc@3": 0.5, "pass@1": 0.5, "pass@2": (1 + 2 / 3) / 2, "maj@1": 0.5, "maj@2": (2 / 3 + 1 / 3) / 2}
    for name, figure in (known | {"maj@3": 0.5}).items():
        assert float(rows["a"][name].split()[0]) == pytest.approx(figure, abs=5e-4), name
        assert re.fullmatch(r"0\.\d{3} \[0\.\d{3}, [01]\.\d{3}\]", rows["a"][name])
    assert rows["weighted by size"]["acc@3"].startswith("0.333 [")
    assert [row["problems"] for row in rows.values()] == ["2", "1", "3"]
    assert rows["a"]["spread of runs"] == "0.408", "1, 1/2 and 0: the root of 1/6"
    assert re.search(r"^simple average +0\.250 \[\S+ \S+ +0\.250 \[", block, re.M), "of no set of problems"


def test_lengths_and_failures_have_intervals_and_both_averages():
    rows = _rows(evaluation_table(PROBLEMS, TableOptions()).split("\n\n")[1].replace("simple ", ""))
    names = ["mean tokens", "of right", "of wrong", "truncated", "no answer", "grading errors"]
    known = {
        "a": ["20.0", "10.0", "30.0", "0.000", "0.000", "0.000"],
        "b": ["30.0", "-", "30.0", "0.667", "0.667", "0.333"],
        "weighted by size": ["23.3", "10.0", "30.0", "0.222", "0.222", "0.111"],
        "average": ["25.0", "-", "30.0", "0.333", "0.333", "0.167"],  # "b" has no right response
    }
    for name, figures in known.items():
        assert {column: cell.partition(" ")[0] for column, cell in rows[name].items()} == dict(
            zip(names, figures, strict=True)
        )
    # Two problems with the mean lengths 50/3 and 70/3: Student's interval, t = 12.706, of 20 ± t · (20/3)/√2/√2 < 0.
    assert rows["a"]["mean tokens"] == "20.0 [0.0, 62.4]"
    assert rows["b"]["mean tokens"] == "30.0 [-, -]"  # One problem says nothing about others.
    # Wilson's interval of 0 in 2 for the truncated ones of "a": its upper limit is z²/(2 + z²).
    assert rows["a"]["truncated"] == "0.000 [0.000, 0.658]"
    assert all("[" in cell for row in rows.values() for cell in row.values() if cell != "-")


def test_parts_by_column_stand_in_the_order_of_their_values():
    options = TableOptions(by=("level", "subject", "nothing"), first={"a": 2})
    blocks = evaluation_table(PROBLEMS, options).split("\n\n")
    assert list(_rows(blocks[2])) == ["a (first 2), level 9", "a (first 2), level 10"]
    assert list(_rows(blocks[3])) == ["a (first 2), subject algebra"]
    assert blocks[4:] == ["No problem has a text or number 'nothing'.", "In brackets: 95 % intervals."]


@pytest.mark.parametrize(
    ("compare", "predictions", "votes"),
    [
        ("math", ("1/2", "0.5", "one", None), (0, 0, 1, -1)),
        ("text", ("1/2", "0.5", "one", None), (0, 1, 2, -1)),
        ("text", ("Oslo", "oslo ", "Bergen"), (0, 0, 1)),
        ("exact", ("Oslo", "oslo ", "Bergen"), (0, 1, 2)),
    ],
)
def test_answers_vote_as_the_task_compares_them(compare, predictions, votes):
    samples = [sample(sample=k, prediction=text) for k, text in enumerate(predictions)]
    assert tuple(with_votes(sample_frame(samples, len(samples)), {"d": compare})["vote"]) == votes


@pytest.mark.parametrize("status", ["unknown_tokens", "unscored"])
def test_what_can_not_be_right_whatever_its_answer_is_has_no_vote(status):
    samples = [sample(prediction="12", status=status), sample(sample=1, prediction="12", status="right")]
    assert with_votes(sample_frame(samples, 2), {})["vote"].tolist() == [-1, 0]


def test_an_answer_that_is_not_worked_out_has_no_vote_although_it_equals_a_right_one():
    samples = [sample(prediction="7+5", status="unevaluated"), sample(sample=1, prediction="12", status="right")]
    assert tuple(with_votes(sample_frame(samples, 2), {"d": "math"})["vote"]) == (-1, 0)


def test_a_problem_with_an_unscored_sample_is_in_no_accuracy_and_in_every_length():
    """`b` has two problems, of which one is left out; `c` has none left."""
    known = _problem("b", 0, (1, 0, 0), level=1)
    silent = [_problem(name, 1, (1, 1, 0), statuses=("right", "right", "unscored"), level=1) for name in "bc"]
    options = TableOptions(pass_at=(1, 2), maj_at=(3,), by=("level",))
    table = evaluation_table(pd.concat([known, *silent], ignore_index=True), options)
    solved, left_out, responses, by_level, _ = table.split("\n\n")
    alone = evaluation_table(known, options).split("\n\n")
    assert (solved, by_level) == (alone[0], alone[2])
    assert left_out == "Left out of the accuracy: 2 problems with a response that is `unscored`."
    of_b = _rows(responses)["b"]
    assert [of_b[name].split()[0] for name in ("mean tokens", "of right", "of wrong")] == ["20.0", "10.0", "30.0"]
    assert evaluation_table(silent[1], options).startswith("Left out of the accuracy: 1 problems")


def test_problems_are_whole_and_in_order_whatever_the_order_of_their_samples():
    samples = [sample(index=index, sample=k, num_tokens=10 * index + k) for index in (1, 0, 2) for k in (2, 0, 1)]
    again = sample(index=0, sample=1, num_tokens=99)  # Of a sample that is there twice the first one counts.
    mixed = [*samples[::2], *samples[1::2], again]
    assert list(sample_frame(samples, 3)["num_tokens"])[-3:] == [20, 21, 22]
    mixed.remove(samples[-1])  # Problem 2 lacks a sample.
    assert list(sample_frame(mixed, 3)["num_tokens"]) == [0, 1, 2, 10, 11, 12]


def test_a_dataset_with_the_name_of_an_average_keeps_its_row():
    parts = parts_of({"simple average": 10, "b": 30})
    assert parts["simple average"] == {"simple average": 1.0}
    assert parts["simple average of all"] == {"simple average": 0.5, "b": 0.5}
    assert parts["weighted by size"] == {"simple average": 0.25, "b": 0.75}


def test_values_of_a_column_steer_no_terminal():
    hostile = pd.concat([_problem("a\x1b[2J", 0, (1, 0, 0), subject="\x1b[31mred\u202e")], ignore_index=True)
    table = evaluation_table(hostile, TableOptions(by=("subject",)))
    assert all(c.isprintable() or c == "\n" for c in table)
    assert r"subject \x1b[31mred\u202e" in table
