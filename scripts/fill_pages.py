"""Fill examples, columns of files, the board and the options into the pages, which then read without a build.

    python scripts/fill_pages.py

A fenced block names its file, ```` ```yaml title="my_reward.yaml" ````, and everything between the fences is replaced.
Everything between ``<!-- columns -->`` and ``<!-- end of columns -->`` is replaced by the table of
`grail_lightning.core.records.columns`, between ``<!-- board -->`` and ``<!-- end of board -->`` by the tables of
the results in `grail_lightning/app/benchmark/board`, and between ``<!-- options -->`` and ``<!-- end of options -->``
by every option of the command line.
"""

from __future__ import annotations

import re
from pathlib import Path

from page_parts import with_part

from grail_lightning.app.benchmark.board import BOARD, board_page, read_board
from grail_lightning.core.records.columns import COLUMNS, PREDICTION, SAMPLE, TRAINING

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r'^(```\w+ title="([^"]+)")\n.*?^```$', re.MULTILINE | re.DOTALL)
BEGIN, END = "<!-- columns -->\n", "<!-- end of columns -->"
BEGIN_OPTIONS, END_OPTIONS = "<!-- options -->\n", "<!-- end of options -->"
BEGIN_BOARD, END_BOARD = "<!-- board -->\n", "<!-- end of board -->"
FILES = {"rollouts": TRAINING, "samples": SAMPLE, "predictions": PREDICTION}


def columns_table() -> str:
    """Every column as a row of a Markdown table: name, type, the files that have it, meaning."""
    rows = ["| column | type | in | meaning |", "|---|---|---|---|"]
    for name, column in COLUMNS.items():
        kind = re.sub(r"list<(\w+)>", r"list of \1", column.kind)
        files = ", ".join(file for file, names in FILES.items() if name in names)
        rows.append(f"| `{name}` | {kind} | {files} | {column.meaning} |")
    return "\n".join(rows)


def filled(page: str, board: Path = BOARD) -> str:
    """The text of a page with the present text of each file that it names, the columns, the board and the options."""
    page = BLOCK.sub(lambda block: f"{block[1]}\n{(DOCS / 'examples' / block[2]).read_text().rstrip()}\n```", page)
    page = with_part(page, BEGIN, END, columns_table())
    if BEGIN_OPTIONS in page:
        from options_page import options_page  # It builds the parser of the command line, which takes seconds.

        page = with_part(page, BEGIN_OPTIONS, END_OPTIONS, options_page())
    if BEGIN_BOARD in page:
        page = with_part(page, BEGIN_BOARD, END_BOARD, board_page(read_board(board)))
    return page


if __name__ == "__main__":
    for path in [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]:
        path.write_text(filled(path.read_text()))
