"""One self-contained HTML page of rollouts with their token credit.

Text of a model is untrusted. It reaches the page as JSON alone, in which nothing can end the script element that holds
it; the page's program puts it into the document as text, never as markup; and the page's policy lets no other program
run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grail_lightning.runtime.files import write_whole
from grail_lightning.views.colours import LARGEST, asset
from grail_lightning.views.prefix_tree import Node, forks, prefix_tree
from grail_lightning.views.rollouts import Credit, Rollout, read_rollouts

MAX_ROLLOUTS = 200
MAX_BYTES = 4_500_000  # Of the data, so that the page stays below 5 MB.
_FACTS = ("status", "reward", "advantage", "finished")


def write_page(files: Sequence[Path], page: Path, max_rollouts: int = MAX_ROLLOUTS, title: str | None = None) -> str:
    """Write the page of one or several Parquet files of predictions.

    Args:
        files: Files that `PredictionWriter` wrote. The same rollouts in several files are shown with all methods.
        page: The file to write. It appears when it is complete.
        max_rollouts: The largest number of rollouts. Fewer are shown if they need more than 5 MB.
        title: The heading; default the path of the first file.

    Returns:
        One sentence that says what was written, and how to see what was left out.
    """
    rollouts, rows = read_rollouts(files, max_rollouts)
    content, shown = render(rollouts, title or str(files[0]), rows)
    write_whole(page, content)
    said = f"Wrote a page of {shown} rollouts to {page}."
    if shown == rows:
        return said
    more = f"python -m grail_lightning.views {' '.join(map(str, files))} --max_rollouts {rows}"
    return f"{said} It leaves out {rows - shown}: `{more}` shows more of them, up to 5 MB."


def render(rollouts: Sequence[Rollout], title: str, num_rows: int | None = None) -> tuple[str, int]:
    """The page as HTML, and the number of rollouts that it shows.

    Args:
        rollouts: The rollouts. Those of one problem form a group.
        title: The heading of the page.
        num_rows: The number of rollouts that there are; default those that are given.
    """
    import jinja2
    from markupsafe import Markup

    groups: dict[tuple[str, str, str], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.problem, []).append(rollout)
    methods = list(dict.fromkeys(name for rollout in rollouts for name in rollout.methods))
    shown: list[dict[str, Any]] = []
    size = number = 0
    for members in groups.values():
        group = _group(members, methods, number)
        size += len(_json(group).encode())
        if shown and size > MAX_BYTES:
            break
        shown.append(group)
        number += len(members)
    data = {
        "methods": methods,
        "groups": shown,
        "largest": LARGEST,
        "left_out": max((num_rows or len(rollouts)) - number, 0),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("grail_lightning.views"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_function"] = _json
    style, program = asset("palette.css") + asset("page.css"), asset("draw.js") + asset("use.js")
    content = environment.get_template("page.html.j2").render(
        title=title,
        data=data,
        style=Markup(style),  # noqa: S704  (our own file)
        program=Markup(program),  # noqa: S704  (our own file)
        style_hash=policy_hash(style),
        program_hash=policy_hash(program),
    )
    return content, number


def _group(members: Sequence[Rollout], methods: Sequence[str], first: int) -> dict[str, Any]:
    """A group as the page's program reads it."""
    dataset, prompt, reference = members[0].problem
    token_ids = [rollout.row["token_ids"] for rollout in members]
    correct = [bool(rollout.row["correct"]) for rollout in members]
    tree, steps = prefix_tree(token_ids, correct), [labelled_steps(rollout.row) for rollout in members]
    at = forks(tree, steps)
    return {
        "dataset": dataset,
        "prompt": prompt,
        "reference": reference,
        "rollouts": [
            rollout_parts(rollout, methods, steps[k], at.get(k), first + k) for k, rollout in enumerate(members)
        ],
        "tree": _flat(tree, at),
    }


def rollout_parts(
    rollout: Rollout, methods: Sequence[str], steps: list[tuple[int, int, str]], fork: int | None, number: int
) -> dict[str, Any]:
    """A rollout as plain values: the piece of text of each token, and what each method and the task say of it."""
    row = rollout.row
    pieces, outside = _pieces(row)
    credit = [rollout.methods.get(name) for name in methods]
    first, last = row.get("box_first_token"), row.get("box_last_token")
    return {
        "number": number + 1,
        "correct": bool(row["correct"]),
        **{name: _short(row.get(name)) for name in _FACTS},
        "pieces": pieces,
        "outside": outside,
        "credit": [None if given is None else _credit(given) for given in credit],
        "box": None if first is None else [first, last],
        "steps": steps,
        "fork": fork,
    }


def _credit(credit: Credit) -> dict[str, Any]:
    values = {"weights": credit.weights, "scores": credit.scores}
    shown = {name: None if of is None else [_short(value) for value in of] for name, of in values.items()}
    return shown | {"fallback": credit.fallback}


def _pieces(row: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The part of the response that each token adds, and the indices of tokens that are outside of the response.

    The first of several tokens that share a character has it. A token outside, such as one that ends the response, is
    shown as it is decoded by itself.
    """
    text, done = row["response"], 0
    pieces, outside = [], []
    for index, (start, stop, token) in enumerate(
        zip(row["token_starts"], row["token_stops"], row["tokens"], strict=True)
    ):
        if start == stop:
            outside.append(index)
            pieces.append(token)
        else:
            pieces.append(text[max(start, done) : stop])
            done = max(done, stop)
    return pieces, outside


def labelled_steps(row: dict[str, Any]) -> list[tuple[int, int, str]]:
    """The first token, the last token and the kind of each labelled step."""
    steps = []
    ranges = list(zip(row["token_starts"], row["token_stops"], strict=True))
    for start, stop, kind in zip(
        *(row.get(f"step_{name}") or [] for name in ("starts", "stops", "kinds")), strict=True
    ):
        tokens = [k for k, (a, b) in enumerate(ranges) if a < stop and b > start]
        if tokens:
            steps.append((tokens[0], tokens[-1], kind))
    return steps


def _flat(root: Node, forks: Mapping[int, int]) -> list[dict[str, Any]]:
    """The nodes of a tree in the order in which they are shown, each with its depth and whether it begins at a fork."""
    flat, todo = [], [(root, 0)]
    while todo:
        node, depth = todo.pop()
        fork = not node.num_correct and any(forks.get(r) == node.start for r in node.rollouts)
        shown = {"depth": depth, "start": node.start, "stop": node.stop, "rollouts": node.rollouts}
        flat.append(shown | {"correct": node.num_correct, "end": not node.children, "fork": fork})
        todo += [(child, depth + 1) for child in reversed(node.children)]
    return flat


def _short(value: Any) -> Any:
    """A number with three significant digits; null if it is not finite."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded


def _json(value: Any, **options: Any) -> str:
    r"""Compact JSON. Jinja2 escapes ``<``, ``>``, ``&`` and ``'`` in it; U+2028 and U+2029 are escaped here."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def policy_hash(text: str) -> str:
    """The hash by which a page's policy allows a style sheet or a program that stands in it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
