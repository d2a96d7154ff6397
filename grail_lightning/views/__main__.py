"""Make a page of predictions: `python -m grail_lightning.views FILE.parquet`. No model is loaded."""

import sys
from pathlib import Path

from grail_lightning.runtime.console import Parser, refused
from grail_lightning.views.page import MAX_ROLLOUTS, write_page

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns 0, or 2 for a user's mistake, which is one line on stderr."""
    parser = Parser(prog="python -m grail_lightning.views", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="Parquet that `predict` wrote")
    parser.add_argument("--output", type=Path, help="the page to write (default: the file's name with .html)")
    parser.add_argument("--max_rollouts", type=int, default=MAX_ROLLOUTS, help="default: %(default)s")
    parser.add_argument("--title", help="the heading (default: the file's path)")
    try:
        options = parser.parse_args(arguments)
        page = options.output or options.file.with_suffix(".html")
        if page == options.file:
            raise ValueError(f"`--output` must be a file of its own, but got {page}. Name another one.")
        print(write_page(options.file, page, options.max_rollouts, options.title))
    except (ValueError, OSError) as error:
        return refused("grail_lightning.views", error, choose="file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
