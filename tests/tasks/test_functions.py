"""Functions from specifications: what the words ask for, which tests hide, and how demonstrations err."""

import random
from collections import Counter

from grail_lightning.tasks.functions import FunctionSpace, function_demonstration

PROBLEMS = FunctionSpace().draw(400, "train")


def called(program, arguments):
    """What the function returns; None if it raises. The program is that of our generator."""
    names = {}
    try:
        exec(program, names)
        return names["f"](*arguments)
    except (SyntaxError, NameError, TypeError):
        return None


LARGEST = """def f(xs, n):
    total = 0
    for x in xs[::2]:
        if x % 3 != 0:
            if x + 3 > total:
                total = x + 3
    if total > 12:
        return 12
    return total"""


def test_a_program_does_what_the_words_ask_for():
    assert PROBLEMS[25].text == (
        "Write f(xs, n). Return the largest of every second number that are no multiples of 3, each plus 3, at least "
        "0. If the result is above 12, return 12."
    )
    assert PROBLEMS[25].program == LARGEST


def test_a_row_has_hidden_tests_with_the_results_of_its_program_and_counts_statements():
    rows = [problem.row() for problem in PROBLEMS]
    for row in rows:
        assert [called(row["reference"], arguments) for arguments, _ in row["tests"]] == [r for _, r in row["tests"]]
        assert ([], len(row["tests"])) == (row["tests"][0][0][0], 8)
    assert {row["statements"] for row in rows} == {4, 5, 6, 7, 8}
    # A statement is a line behind the header, other than `else:`.
    row = next(row for row in rows if "else:" in row["reference"])
    assert row["statements"] == len(row["reference"].split("\n")) - 2 == len(row["tempting"]) - 2


def test_a_misconception_is_what_words_suggest_and_fails_a_test():
    seen, failed = Counter(), Counter()
    for problem in PROBLEMS:
        tests = problem.row()["tests"]
        for k, line in enumerate(problem.lines):
            if line.tempting:
                kind = line.tempting.split()[0]
                wrong = problem.program.split("\n")
                wrong[k] = wrong[k].replace(line.text, line.tempting)
                seen[kind] += 1
                failed[kind] += any(called("\n".join(wrong), a) != result for a, result in tests)
    assert seen.keys() >= {"for", "if", "total", "continue"}
    assert min(seen.values()) > 10
    assert sum(failed.values()) > 0.93 * sum(seen.values())
    assert "if x < n:" in {line.tempting for p in PROBLEMS for line in p.lines if line.text == "if x <= n:"}


def test_a_demonstration_without_mistakes_is_the_program():
    assert {function_demonstration(p, random.Random(0)) for p in PROBLEMS} == {
        f"```python\n{p.program}\n```" for p in PROBLEMS
    }
