"""How often `EGCA` blames the flawed statement of a program: programs with one known flaw each, by its kind.

::

    python benchmarks/blamed_statements.py [--problems 60]

The programs are those of the generated world (`FunctionSpace`, validation) and those of `REFERENCES`, each with one
statement changed. The changed statement is the flawed one; where one is left out, it is the next, as in `CodeTask`. A
program that passes its tests all the same is left out. The kinds:

*slip, misconception*  the mistakes of the generated world. *other operator*  the same slips in `REFERENCES`.
*early return*         the last `return` once more at the end of a loop's body, or of an `if` in it.
*moved return*         the same, but not at the program's end any more: two flaws, of which a test may show the other.
*jump*                 `break` for `continue`, or `continue` for `break`; *no jump*: `pass` for either.
*left out, twice*      a statement that is missing, or one that stands twice.
*late error*           a division by zero, or an index that is too large, behind a loop of 400 rounds.

The columns: programs, the share whose blamed statement is the flawed one, the share without a blamed one, and the modes
of `EGCA`. It takes a minute on two cores.
"""

from __future__ import annotations

import argparse
import copy
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from grail_lightning import CodeTask
from grail_lightning.gallery.code_credit import _find_faults, _Row
from grail_lightning.worlds.code.functions import FunctionSpace, slips

# Programs with the arguments of their tests, whose results are those of the program itself.
REFERENCES: list[tuple[str, list[list[object]]]] = [
    (
        """
        def f(xs, n):
            found = -1
            for k in range(len(xs)):
                if xs[k] == n:
                    found = k
                    break
            return found
        """,
        [[[4, 2, 7, 2], 2], [[1, 3], 9], [[], 1], [[5, 5, 5], 5], [[9, 8, 7], 7]],
    ),
    (
        """
        def f(xs, n):
            total = 0
            for x in xs:
                if x < 0:
                    continue
                total += x * n
            return total
        """,
        [[[3, -1, 4], 2], [[], 5], [[-2, -3], 1], [[1, 2, 3, -4, 5], 3]],
    ),
    (
        """
        def f(n):
            count = 0
            while n != 1:
                if n % 2 == 0:
                    n = n // 2
                else:
                    n = 3 * n + 1
                count += 1
            return count
        """,
        [[6], [1], [7], [9]],
    ),
    (
        """
        def f(rows):
            sums = []
            for row in rows:
                total = 0
                for x in row:
                    if x % 2 == 1:
                        total += x
                sums.append(total)
            return sums
        """,
        [[[[1, 2, 3], [4, 5]]], [[]], [[[2], [], [7, 7]]], [[[1, 1], [3], [6, 9, 1]]]],
    ),
    (
        """
        def f(text):
            counts = {}
            for letter in text:
                if letter == " ":
                    continue
                counts[letter] = counts.get(letter, 0) + 1
            best = ""
            for letter in sorted(counts):
                if best == "" or counts[letter] > counts[best]:
                    best = letter
            return best
        """,
        [["a bb c"], [""], ["hello you"], ["zz aa b"]],
    ),
    (
        """
        def add(a, b):
            s = a + b
            return s
        def f(xs):
            total = 0
            for x in xs:
                total = add(total, x)
                if total > 20:
                    break
            return total
        """,
        [[[1, 2, 3]], [[]], [[10, 9, 8, 7]], [[5, 30, 2]]],
    ),
    (
        """
        def f(n):
            if n < 2:
                return n
            a = f(n - 1)
            b = f(n - 2)
            return a + b
        """,
        [[0], [1], [5], [7]],
    ),
    (
        """
        def f(xs):
            out = []
            last = None
            for x in xs:
                if x == last:
                    continue
                out.append(x)
                last = x
            out.sort()
            return out
        """,
        [[[1, 1, 2]], [[]], [[3, 3, 1, 1, 3]], [[2, 1, 2, 2]]],
    ),
    (
        """
        def f(n):
            primes = []
            for k in range(2, n + 1):
                prime = True
                for p in primes:
                    if p * p > k:
                        break
                    if k % p == 0:
                        prime = False
                        break
                if prime:
                    primes.append(k)
            return primes
        """,
        [[1], [10], [30], [2]],
    ),
    (
        """
        def f(xs, n):
            low = 0
            high = len(xs)
            while low < high:
                middle = (low + high) // 2
                if xs[middle] < n:
                    low = middle + 1
                else:
                    high = middle
            return low
        """,
        [[[1, 3, 5, 7], 5], [[], 1], [[2, 2, 2], 2], [[1, 4, 9, 16, 25], 20]],
    ),
    (
        """
        def f(text):
            depth = 0
            for letter in text:
                if letter == "(":
                    depth += 1
                elif letter == ")":
                    depth -= 1
                    if depth < 0:
                        return False
            return depth == 0
        """,
        [["(())"], [")("], [""], ["(()"], ["a(b)c)"]],
    ),
    (
        """
        def f(xs):
            largest = 0
            run = 0
            for x in xs:
                run = run + x
                if run < 0:
                    run = 0
                if run > largest:
                    largest = run
            return largest
        """,
        [[[1, -2, 3, 4]], [[]], [[-1, -2]], [[4, -1, 5, -9, 3]]],
    ),
]
# The statement at the end of a program whose loop takes 400 rounds, and what raises in its place.
LATE = [
    ("return s / (n - 1)", "return s / (n - n)"),
    ("return s / n", "return s / (len(xs) - n)"),
    ("return xs[-1]", "return xs[n]"),
]


class Flawed(NamedTuple):
    """A program with one flaw."""

    kind: str
    program: str
    line: int  # The number of the flawed line, from 0.


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def body_end(lines: list[str], header: int) -> int:
    """The number of the line behind the body of a compound statement."""
    return next((k for k in range(header + 1, len(lines)) if depth(lines[k]) <= depth(lines[header])), len(lines))


def in_place(lines: list[str], number: int, *put: str) -> str:
    """The program with other lines in the place of one."""
    return "\n".join([*lines[:number], *put, *lines[number + 1 :]])


def early_returns(lines: list[str]) -> Iterator[Flawed]:
    """The last `return` at the end of the body of a loop, or of an `if` in one; the one at the end may stay."""
    returned = lines[-1].strip()
    loops = [k for k, line in enumerate(lines) if line.lstrip().startswith(("for ", "while "))]
    inside = {j for k in loops for j in range(k + 1, body_end(lines, k)) if lines[j].lstrip().startswith("if ")}
    for header in sorted({*loops, *inside}):
        end, indent = body_end(lines, header), " " * (depth(lines[header]) + 4)
        if lines[end - 1].strip().startswith(("break", "continue", "return")):
            continue
        if lines[end].lstrip().startswith(("else", "elif")):
            continue
        for kind, rest in (("early return", lines[end:]), ("moved return", lines[end:-1])):
            yield Flawed(kind, "\n".join([*lines[:end], indent + returned, *rest]), end)


def changes(lines: list[str]) -> Iterator[Flawed]:
    """The flaws of a program of one statement a line."""
    yield from early_returns(lines)
    for number, line in enumerate(lines):
        text, indent = line.strip(), " " * depth(line)
        if text in ("break", "continue"):
            other = "continue" if text == "break" else "break"
            yield Flawed("jump", in_place(lines, number, indent + other), number)
            yield Flawed("no jump", in_place(lines, number, indent + "pass"), number)
        if text.startswith(("def ", "else")):
            continue
        for wrong in slips(text):
            if text.endswith(":") == wrong.endswith(":") and "break" not in text:
                yield Flawed("other operator", in_place(lines, number, indent + wrong), number)
        alone = number + 1 < len(lines) and depth(lines[number - 1]) < depth(line) > depth(lines[number + 1])
        if not text.endswith(":") and number + 1 < len(lines):
            if not alone and text not in ("break", "continue"):
                yield Flawed("left out", in_place(lines, number), number)
            if not text.startswith(("return", "break", "continue")):
                yield Flawed("twice", in_place(lines, number, line, line), number + 1)


def of_world(number: int) -> Iterator[tuple[dict[str, object], Flawed]]:
    """The rows of the generated world with its mistakes and with those of `changes`."""
    for problem in FunctionSpace().draw(number, "validation"):
        lines, row = problem.program.split("\n"), problem.row()
        for k, line in enumerate(problem.lines):
            wrong = [] if line.text.startswith(("def", "else")) else slips(line.text)
            named = [("slip", text) for text in wrong if text.endswith(":") == line.text.endswith(":")]
            named += [("misconception", line.tempting)] if line.tempting else []
            for kind, text in named:
                jump = "jump" if line.text == "break" else kind
                yield row, Flawed(jump, in_place(lines, k, " " * depth(lines[k]) + text), k)
        for flawed in early_returns(lines):
            yield row, flawed


def by_hand() -> Iterator[tuple[dict[str, object], Flawed]]:
    """The rows of `REFERENCES`, and programs that fail after a long loop."""
    for text, arguments in REFERENCES:
        program = textwrap.dedent(text).strip()
        row = row_of(program, arguments)
        for flawed in changes(program.split("\n")):
            yield row, flawed
    for right, wrong in LATE:
        lines = f"def f(xs):\n    n = len(xs)\n    s = 0\n    for x in xs:\n        s += x\n    {right}".split("\n")
        row = row_of("\n".join(lines), [[[*range(400)]], [[*range(450)]]])
        yield row, Flawed("late error", in_place(lines, 5, f"    {wrong}"), 5)
        yield row, Flawed("late error", in_place(lines, 4, "        s += 1 // (399 - x)"), 4)


def row_of(program: str, arguments: list[list[object]]) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(program, names)  # Our own text.
    tests = [[copy.deepcopy(given), names["f"](*copy.deepcopy(given))] for given in arguments]  # type: ignore[operator]
    return {"problem": "", "entry": "f", "tests": tests, "reference": program}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=60, help="of the generated world")
    parser.add_argument("--show", default="", help="a kind whose programs that are blamed wrongly are printed")
    options = parser.parse_args()
    task = CodeTask(instruction="")
    made = {
        (str(row["reference"]), flawed.program): (row, flawed)
        for row, flawed in [*of_world(options.problems), *by_hand()]
    }
    prompts = [task.prompt(row) for row, _ in made.values()]
    rows = [_Row(prompt, None, flawed.program, 0) for prompt, (_, flawed) in zip(prompts, made.values(), strict=True)]  # type: ignore[arg-type]
    _find_faults(rows)
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for row, (_, flawed) in zip(rows, made.values(), strict=True):
        if row.mode == "correct":
            continue
        blamed = None if row.blamed is None else row.text.count("\n", 0, row.parts[row.blamed][0])
        table[flawed.kind].update(["all", row.mode, *["right"] * (blamed == flawed.line)])
        if blamed != flawed.line and flawed.kind == options.show:
            print(f"--- {row.mode}, flawed {flawed.line}, blamed {blamed}\n{flawed.program}")
    print("| flaw | programs | rightly blamed | syntax | logic | constraint |\n|---|--:|--:|--:|--:|--:|")
    total = sum(table.values(), Counter())
    for kind, found in [*table.items(), ("all", total)]:
        shares = [f"{found[name] / found['all']:.2f}" for name in ("right", "syntax", "logic", "constraint")]
        print(f"| {kind} | {found['all']} | {' | '.join(shares)} |")
    task.executor.close()


if __name__ == "__main__":
    main()
