"""Fill the examples of docs/examples, and the columns of files, into the pages, which then read without a build.

    python scripts/fill_pages.py

A fenced block names its file, ```` ```yaml title="my_reward.yaml" ````, and everything between the fences is replaced.
Everything between ``<!-- columns -->`` and ``<!-- end of columns -->`` is replaced by the table of
`grail_lightning.core.records.columns`.
"""

from __future__ import annotations

import re
from pathlib import Path

from grail_lightning.core.records.columns import COLUMNS, PREDICTION, SAMPLE, TRAINING

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r'^(```\w+ title="([^"]+)")\n.*?^```$', re.MULTILINE | re.DOTALL)
BEGIN, END = "<!-- columns -->\n", "<!-- end of columns -->"
FILES = {"rollouts": TRAINING, "samples": SAMPLE, "predictions": PREDICTION}


def columns_table() -> str:
    """Every column as a row of a Markdown table: name, type, the files that have it, meaning."""
    rows = ["| column | type | in | meaning |", "|---|---|---|---|"]
    for name, column in COLUMNS.items():
        kind = re.sub(r"list<(\w+)>", r"list of \1", column.kind)
        files = ", ".join(file for file, names in FILES.items() if name in names)
        rows.append(f"| `{name}` | {kind} | {files} | {column.meaning} |")
    return "\n".join(rows)


def filled(page: str) -> str:
    """The text of a page with the present text of each file that it names, and the present columns."""
    page = BLOCK.sub(lambda block: f"{block[1]}\n{(DOCS / 'examples' / block[2]).read_text().rstrip()}\n```", page)
    return re.sub(rf"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{columns_table()}\n\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(filled(path.read_text()))
