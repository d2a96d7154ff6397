"""Fill the examples of docs/examples into the pages, which then read without a build.

    python scripts/fill_pages.py

A fenced block names its file, ```` ```yaml title="my_reward.yaml" ````, and everything between the fences is replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r'^(```\w+ title="([^"]+)")\n.*?^```$', re.MULTILINE | re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with the present text of each file that it names."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{(DOCS / 'examples' / block[2]).read_text().rstrip()}\n```", page)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(filled(path.read_text()))
