"""Functions from specifications: what the words ask for, which tests hide, and how demonstrations err."""

import random
import re
from collections import Counter

from grail_lightning.worlds.code.functions import FunctionSpace, function_demonstration

PROBLEMS = FunctionSpace().draw(400, "train")


def solution(text):
    """What a specification asks for, read from its words alone: a function of xs and n."""
    number = r"(n|m|\d+)"

    def f(xs, n):
        let = re.search(r"Here m is n (plus|minus|times) (\d)\.", text)
        sign = {"plus": n.__add__, "minus": n.__sub__, "times": n.__mul__}
        m = sign[let[1]](int(let[2])) if let else None

        def value(word):
            return {"n": n, "m": m}[word] if word in "nm" else int(word)

        among = re.search(r"the (first|last) (\d) numbers", text)
        some = xs
        if among:
            some = xs[: int(among[2])] if among[1] == "first" else xs[max(0, len(xs) - int(among[2])) :]
        for words, part in {"after the first": slice(1, None), "from the third on": slice(2, None)}.items():
            some = xs[part] if words in text else some
        some = xs[: len(xs) - 1] if "before the last" in text and xs else some
        some = [x for k, x in enumerate(xs) if k % 2 == 0] if "every second" in text else some
        if stop := re.search(rf"Stop at the first number above {number}\.", text):
            some = some[: next((k for k, x in enumerate(some) if x > value(stop[1])), len(some))]
        tests = {"even": lambda x: x % 2 == 0, "odd": lambda x: x % 2 != 0, "no multiples of 3": lambda x: x % 3 != 0}
        fits = next((test for words, test in tests.items() if f"are {words}" in text), lambda x: True)
        if bound := re.search(rf"are (at most|at least|below|above) {number}\b", text):
            low, high = {"at most": (-99, 0), "below": (-99, -1), "at least": (0, 99), "above": (1, 99)}[bound[1]]
            fits = lambda x: low <= x - value(bound[2]) <= high  # noqa: E731
        chosen, others = [x for x in some if fits(x)], [x for x in some if not fits(x)]
        if each := re.search(r"each (plus|minus) (n|\d)", text):
            step = value(each[2]) * (1 if each[1] == "plus" else -1)
            chosen = [x + step for x in chosen]
        chosen = [2 * x for x in chosen] if "twice" in text else chosen
        chosen = [x**2 for x in chosen] if "squares" in text else chosen
        return finished(text, chosen, others, n)

    return f


def finished(text, chosen, others, n):
    if "list of" in text:
        return sorted(chosen) if "Sort" in text else chosen[::-1] if "last one first" in text else chosen
    result = sum(chosen)
    if "product" in text:
        result = 1
        for x in chosen:
            result *= x
    result = len(chosen) if "how many" in text else max([0, *chosen]) if "largest" in text else result
    result -= sum(others) if "Subtract the others" in text else 0
    result += n if "Add n" in text else 0
    most = re.search(r"above (\d+), return", text)
    return min(result, int(most[1])) if most else result


def called(program, arguments):
    """What the function returns; None if it raises. The program is that of our generator."""
    names = {}
    try:
        exec(program, names)
        return names["f"](*arguments)
    except (SyntaxError, NameError, TypeError):
        return None


def test_the_hidden_tests_have_the_results_that_the_words_ask_for():
    for problem in PROBLEMS:
        row, f = problem.row(), solution(problem.text)
        assert len(row["tests"]) == 8
        for (xs, n), result in row["tests"]:
            assert f(xs, n) == result, problem.text


def test_a_row_has_hidden_tests_with_the_results_of_its_program_and_counts_statements():
    rows = [problem.row() for problem in PROBLEMS]
    for row in rows:
        assert [called(row["reference"], arguments) for arguments, _ in row["tests"]] == [r for _, r in row["tests"]]
        assert row["tests"][0][0][0] == []
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
