"""Where the pages of the documentation are: in the package's folder `docs`, also where it was installed by pip."""

from __future__ import annotations

from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    """The path of a page on this machine, for messages: ``page("problems.md")``."""
    return str(PAGES / name)
