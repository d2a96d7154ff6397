"""Fill the table of kinds of answers in docs/reference/grading.md from the labelled pairs of tests/answers/kinds.jsonl.

    python scripts/grading_kinds.py

The pairs with `example` are shown: of each kind one that is accepted and one that is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from page_parts import with_part

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "grading.md"
BEGIN, END = "<!-- kinds: python scripts/grading_kinds.py -->\n", "<!-- end of kinds -->"
# ruff: noqa: E501 (a table)
# Of each kind what is accepted, and what is refused.
KINDS = {
    "words that are not known": ("units, counted nouns and phrases of a list", "any other word: names, directions, kinds of change"),
    "kinds of units": ("one kind for a bare number, in any spelling", "another kind, and every conversion"),
    "numbers in words": ("words that are numbers, read on both sides", "the number beside them alone"),
    "names go with values": ("the same names in any order; by order where one side has no names", "values under other names"),
    "lists of quantities": ("the same things; a bare list in their order", "values of other things, another order"),
    "choices with remarks": ("the option's text, or that it is right", "a remark that speaks against it, a second choice"),
    "right answers that look unusual": ("any name on the left, marks of a proof, one sentence", "an equation that is to be solved, a changed value"),
    "bound letters and variables": ("letters renamed where they are declared", "another set of values, a free letter"),
    "sets and intervals": ("intervals, inequalities and unions of one set", "another end, bracket or member"),
    "separators": ("digits in groups, with every usual sign", "other digits, and pairs in brackets"),
    "bases": ("the base as a number, a word or a prefix", "another base, and the digits alone"),
    "dates and times": ("two forms of one date or clock time", "another date or half of the day; quotients"),
    "Chinese and full width": ("full-width signs, numerals and known words", "multiples that are dropped, other words"),
    "Unicode": ("signs for their commands, raised and lowered digits", "raised digits for plain ones"),
    "matrices and vectors": ("brackets of any form, transposes, sums with factors", "another order of the entries"),
    "functions and operators": ("combinations, remainders, cases, congruences, values", "inverse for reciprocal, other sides"),
    "numbers of many digits": ("equal values of any size within the caps", "values that are only close"),
    "percents and equations": ("hundredths, multiples of an equation", "other powers of ten, other equations"),
}  # fmt: skip


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")


def table() -> str:
    """The table in Markdown."""
    pairs = [json.loads(line) for line in (ROOT / "tests/answers/kinds.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = ["| kind | pairs | accepted | for example | refused | for example |", "|---|--:|---|---|---|---|"]
    for kind, (accepted, refused) in KINDS.items():
        of_kind = [pair for pair in pairs if pair["subject"] == kind]
        right, wrong = (
            next(pair for pair in of_kind if pair.get("example") and pair["equal"] is equal) for equal in (True, False)
        )
        cells = [
            kind,
            str(len(of_kind)),
            accepted,
            f"{_code(right['answer'])} for {_code(right['reference'])}",
            refused,
            f"{_code(wrong['answer'])} for {_code(wrong['reference'])}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The text of the page with the present table."""
    return with_part(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
