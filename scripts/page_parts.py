"""Parts of pages that programs write, between two marks."""

from __future__ import annotations


def with_part(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` between the marks `begin` and `end`; as it is if it has no such part."""
    before, mark, rest = page.partition(begin)
    if not mark:
        return page
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text.rstrip()}\n\n{end}{after}"
