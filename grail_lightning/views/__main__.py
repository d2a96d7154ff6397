"""Make a page of predictions: `python -m grail_lightning.views FILE.parquet [FILE2.parquet ...]`. No model is loaded.

The same rollouts in several files are shown once, with the methods of all files side by side.
"""

import sys
from pathlib import Path

from grail_lightning.runtime.console import Parser, refused
from grail_lightning.views.page import MAX_ROLLOUTS, write_page

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns 0, or 2 for a user's mistake, which is one line on stderr."""
    parser = Parser(prog="python -m grail_lightning.views", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Parquet that `predict` wrote")
    parser.add_argument("--output", type=Path, help="the page to write (default: the first file's name with .html)")
    parser.add_argument("--max_rollouts", type=int, default=MAX_ROLLOUTS, help="default: %(default)s")
    parser.add_argument("--title", help="the heading (default: the first file's path)")
    try:
        options = parser.parse_args(arguments)
        page = options.output or options.files[0].with_suffix(".html")
        if page in options.files:
            raise ValueError(f"`--output` must be a file of its own, but got {page}. Name another one.")
        print(write_page(options.files, page, options.max_rollouts, options.title))
    except (ValueError, OSError) as error:
        return refused("grail_lightning.views", error, choose="file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
