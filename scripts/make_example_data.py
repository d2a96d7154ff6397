"""The problems of docs/examples, from the package's own generators, of a kind that the packaged policies know.

python scripts/make_example_data.py
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grail_lightning import ArithmeticData, Split, WordProblemData
from grail_lightning.worlds.sums.task import Problem
from grail_lightning.worlds.words.task import WordProblemSpace

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SIZES = {"num_train": 256, "num_val": 128}


def write(folder: Path) -> None:
    """Write the files of both splits."""
    (folder / "csv").mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        sums = list(sum_rows(split))
        _write_lines(folder / f"sums_{split}.jsonl", sums)
        _write_lines(folder / f"words_{split}.jsonl", word_problem_rows(split))
        with (folder / "csv" / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["question", "result"])
            writer.writerows([row["problem"], row["answer"]] for row in sums)


def sum_rows(split: Split) -> Iterable[dict[str, Any]]:
    """Sums of five terms, whose level is the number of running totals that have two digits or are negative."""
    for prompt in ArithmeticData(**SIZES).load(split)[0].prompts:
        problem = Problem.parse(prompt.columns["problem"])
        terms = [problem.operands[0], *(b if sign == "+" else -b for sign, b in problem.terms)]
        level = sum(not 0 <= total <= 9 for total in problem.totals)
        yield {"problem": prompt.messages, "answer": str(problem.answer), "terms": terms, "level": level}


def word_problem_rows(split: Split) -> Iterable[dict[str, Any]]:
    """Word problems of the kind that the packaged policy `words` was made for."""
    space = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
    ((_, table),) = WordProblemData(**SIZES, problems=space).tables(split)
    for row in table.rows:
        yield {"problem": row["problem"], "answer": row["answer"]}


def _write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(EXAMPLES)
