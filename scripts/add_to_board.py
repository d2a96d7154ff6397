"""Add results of the benchmark to the board of the package, and make docs/benchmark.md anew.

    python scripts/add_to_board.py RESULT.json [RESULT.json ...]

A result is a file that `python -m grail_lightning.benchmark` has written. Its row has no rollouts and no learning
curves. A row of the same label is replaced.
"""

from __future__ import annotations

import argparse
import sys

from fill_pages import DOCS, filled

from grail_lightning.app.benchmark.board import BOARD, write_row
from grail_lightning.app.benchmark.result import read_result


def main(arguments: list[str] | None = None) -> None:
    """Write the rows, and the page; a wrong file is one line, and nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="RESULT")
    try:
        results = [read_result(file) for file in parser.parse_args(arguments).results]
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    for result in results:
        print(f"Wrote {write_row(result, BOARD)}.")
    page = DOCS / "benchmark.md"
    page.write_text(filled(page.read_text(), BOARD))
    print(f"Wrote {page}.")


if __name__ == "__main__":
    main()
