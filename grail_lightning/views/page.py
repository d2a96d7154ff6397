"""One self-contained HTML page of rollouts with their token credit, and a picture for notebooks.

Text of a model is untrusted. It reaches the page as JSON alone, in which nothing can end the script element that holds
it; the page's program puts it into the document as text, never as markup; and the page's policy lets no other program
run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grail_lightning.environments.episode import read_episode
from grail_lightning.runtime.files import write_whole
from grail_lightning.tasks.problem import Step
from grail_lightning.views.pictures import LARGEST, ShownRollout, heatmap
from grail_lightning.views.prefix_tree import prefix_tree
from grail_lightning.views.rollouts import Rollout, read_rollouts

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ROLLOUTS = 200
_CUT = 300  # Characters of a call's name and of its result, whose whole text is among the tokens.
_MAX_BYTES = 4_500_000  # Of the data, so that the page stays below 5 MB.


def write_page(file: str | Path, page: str | Path, max_rollouts: int = MAX_ROLLOUTS, title: str | None = None) -> str:
    """Write the page of a Parquet file of predictions. It appears when it is complete.

    Args:
        file: A file that `PredictionWriter` wrote.
        page: The file to write.
        max_rollouts: The largest number of rollouts. Fewer are shown if they need more than 5 MB.
        title: The heading; default the path of the file.

    Returns:
        One sentence that says what was written, and how to see what was left out.
    """
    rollouts, rows = read_rollouts(Path(file), max_rollouts)
    content, shown = _render(rollouts, title or str(file), rows)
    write_whole(Path(page), content)
    said = f"Wrote a page of {shown} rollouts to {page}."
    if shown == rows:
        return said
    more = f"grail_lightning.views.write_page({str(file)!r}, 'more.html', max_rollouts={rows})"
    return f"{said} It leaves out {rows - shown}: `{more}` shows more of them, up to 5 MB."


def _render(rollouts: Sequence[Rollout], title: str, num_rows: int) -> tuple[str, int]:
    """The page as HTML, and the number of rollouts that it shows, of `num_rows` that there are."""
    import jinja2
    from markupsafe import Markup

    groups: dict[tuple[str, ...], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.problem, []).append(rollout)
    methods = list(dict.fromkeys(name for rollout in rollouts for name in rollout.methods))
    shown: list[dict[str, Any]] = []
    size = number = 0
    for members in groups.values():
        group = _group(members, methods, number)
        size += len(_json(group).encode())
        if shown and size > _MAX_BYTES:
            break
        shown.append(group)
        number += len(members)
    templates = resources.files("grail_lightning.views").joinpath("templates")
    style, program = (
        "".join(templates.joinpath(name).read_text(encoding="utf-8") for name in names)
        for names in (("palette.css", "page.css"), ("draw.js", "use.js"))
    )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("grail_lightning.views"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_function"] = _json
    content = environment.get_template("page.html.j2").render(
        title=title,
        data={"methods": methods, "groups": shown, "largest": LARGEST, "left_out": num_rows - number},
        style=Markup(style),  # noqa: S704  (our own file)
        program=Markup(program),  # noqa: S704  (our own file)
        style_hash=_policy_hash(style),
        program_hash=_policy_hash(program),
    )
    return content, number


def _group(members: Sequence[Rollout], methods: Sequence[str], first: int) -> dict[str, Any]:
    """A group as the page's program reads it."""
    rows = [rollout.row for rollout in members]
    steps = [_token_steps(row) for row in rows]
    tree, forks = prefix_tree([row["token_ids"] for row in rows], [bool(row["correct"]) for row in rows], steps)
    parts, sources = [], dict[str, int]()  # The pictures, once for the group, and their numbers.
    for k, (rollout, row) in enumerate(zip(members, rows, strict=True)):
        pieces, outside = _pieces(row)
        parts.append(
            {
                "number": first + k + 1,
                "correct": bool(row["correct"]),
                **{name: _short(row.get(name)) for name in ("status", "reward", "advantage", "finished")},
                "pieces": pieces,
                "outside": outside,
                "credit": [_short(_with_turns(rollout.methods.get(name), row)) for name in methods],
                "box": None if row.get("box_first_token") is None else [row["box_first_token"], row["box_last_token"]],
                "steps": steps[k],
                "fork": forks.get(k),
                **_turns(row),
                "pictures": _pictures(row, sources),
            }
        )
    dataset, prompt, reference = members[0].problem
    return {
        "dataset": dataset,
        "prompt": prompt,
        "reference": reference,
        "rollouts": parts,
        "tree": tree,
        "sources": [*sources],
    }


def _pictures(row: dict[str, Any], sources: dict[str, int]) -> list[dict[str, Any]]:
    """The pictures of a rollout by the numbers of their `sources`, with saliency in thousandths of the largest one."""
    found: list[dict[str, Any]] = json.loads(row.get("pictures") or "[]")
    largest = max((score for one in found for score in one["scores"] or [] if math.isfinite(score)), default=0.0)
    for one in found:
        shares = [score / largest if largest and math.isfinite(score) else 0.0 for score in one.pop("scores") or []]
        one |= {"source": sources.setdefault(one.pop("src"), len(sources)), "layers": _short(one["layers"])}
        one["shares"] = [round(1000 * share) for share in shares]
    return found


def _turns(row: dict[str, Any]) -> dict[str, Any]:
    """The turns of a rollout in an environment: their scores and calls, the turn of each token, and why it ended."""
    if row.get("episode") is None:
        return {}
    episode = read_episode(row["episode"])
    turns = [
        {"score": _short(turn.score), "calls": [(c.name[:_CUT], c.status, c.result[:_CUT]) for c in turn.calls]}
        for turn in episode.turns
    ]
    return {"end": episode.end, "turns": turns, "turn_of": row["turns"]}


def _with_turns(credit: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any] | None:
    """The credit of a method with sum and mean of the advantages of each turn's tokens, if there are turns."""
    if row.get("episode") is None or credit is None or credit["weights"] is None or row["advantage"] is None:
        return credit
    tokens: dict[int, list[float]] = defaultdict(list)
    for turn, weight in zip(row["turns"], credit["weights"], strict=True):
        tokens[turn].append(row["advantage"] * (weight or 0.0))
    turns = [tokens[turn] for turn in range(max(tokens, default=-1) + 1)]
    return credit | {"turns": [[sum(own), sum(own) / max(1, len(own))] for own in turns]}


def _pieces(row: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The part of the response that each token adds, and the indices of tokens that are outside of the response.

    The first of several tokens that share a character has it. A token outside, such as one that ends the response, is
    shown as it is decoded by itself, and so are those of earlier turns and of an environment's answers.
    """
    places = list(zip(row["token_starts"], row["token_stops"], strict=True))
    turns = row.get("turns") or [0] * len(places)
    last = max(turns, default=0)
    outside = [k for k, (start, stop) in enumerate(places) if start == stop and turns[k] == last]
    return pieces_of(row["response"], places, row["tokens"]), outside


def pieces_of(text: str, places: Sequence[tuple[int, int]], tokens: Sequence[str]) -> list[str]:
    """The part of a text that each token adds, by the characters that it covers; a token without any is itself."""
    pieces, done = [], 0
    for (start, stop), token in zip(places, tokens, strict=True):
        pieces.append(token if start == stop else text[max(start, done) : stop])
        done = max(done, stop)
    return pieces


def _token_steps(row: dict[str, Any]) -> list[tuple[int, int, Any]]:
    """The first token, the last token and the kind of each labelled step."""
    steps = []
    ranges = list(zip(row["token_starts"], row["token_stops"], strict=True))
    labels = (row.get(f"step_{name}") or [] for name in ("starts", "stops", "kinds"))
    for start, stop, kind in zip(*labels, strict=True):
        tokens = [k for k, (a, b) in enumerate(ranges) if a < stop and b > start]
        if tokens:
            steps.append((tokens[0], tokens[-1], kind))
    return steps


def _short(value: Any) -> Any:
    """Numbers with three significant digits, also inside of lists and mappings; null if one is not finite."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
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


def _policy_hash(text: str) -> str:
    """The hash by which a page's policy allows a style sheet or a program that stands in it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def show_credit(file: str | Path, max_rollouts: int = 3) -> Image:
    """The first rollouts of a file of predictions as a picture for notebooks, as TensorBoard shows those of training.

    Args:
        file: A file that `predict` wrote, such as ``predictions.parquet``.
        max_rollouts: The largest number of rollouts. Each is shown once for every method.
    """
    from PIL import Image

    pictures = []
    for rollout in read_rollouts(Path(file), max_rollouts)[0]:
        pieces = _pieces(rollout.row)[0]
        ends = [0, *accumulate(map(len, pieces))]
        labels = _token_steps(rollout.row)
        steps = [Step(start=ends[first], stop=ends[last + 1], kind=kind) for first, last, kind in labels]
        verdict = "right" if rollout.row["correct"] else "wrong"
        shown = [
            ShownRollout(
                title=f"{verdict}, {name}",
                text="".join(pieces),
                tokens=list(pairwise(ends)),
                weights=credit["weights"] or [1.0] * len(pieces),
                steps=steps,
            )
            for name, credit in rollout.methods.items()
        ]
        pictures.append(heatmap(rollout.problem[1], shown))
    return Image.fromarray(np.concatenate(pictures))
