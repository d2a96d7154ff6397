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
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grail_lightning.app.views.heatmap import LARGEST, ShownRollout, heatmap
from grail_lightning.app.views.prefix_tree import prefix_tree
from grail_lightning.core.records.columns import PREDICTION, Row, read_rows
from grail_lightning.core.records.episode import read_episode
from grail_lightning.core.records.picture import PLACE
from grail_lightning.core.records.task import Step
from grail_lightning.core.runtime.files import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

_CUT = 300  # Characters of a call's name and of its result, whose whole text is among the tokens.
_MAX_BYTES = 4_500_000  # Of the data, so that the page stays below 5 MB.


def write_page(file: str | Path, page: str | Path, max_rollouts: int = 200, title: str | None = None) -> str:
    """Write the page of a Parquet file of predictions. It appears when it is complete.

    Args:
        file: A file that `PredictionWriter` wrote.
        page: The file to write.
        max_rollouts: The largest number of rollouts. Fewer are shown if they need more than 5 MB.
        title: The heading; default the path of the file.

    Returns:
        One sentence that says what was written, and how to see what was left out.
    """
    rows, number = _read(Path(file), max_rollouts)
    content, num_rendered = _render(rows, title or str(file), number)
    write_whole(Path(page), content)
    message = f"Wrote a page of {num_rendered} rollouts to {page}."
    if num_rendered == number:
        return message
    more = f"grail_lightning.write_page({str(file)!r}, 'more.html', max_rollouts={number})"
    return f"{message} It leaves out {number - num_rendered}: `{more}` shows more of them, up to 5 MB."


def _read(file: Path, max_rollouts: int) -> tuple[list[Row], int]:
    """The first rollouts of a file that `PredictionWriter` wrote, and the number of all rollouts in it.

    The rollouts of one prompt are kept together: the last group is left out if the limit would cut it, unless it is the
    only one.
    """
    from pyarrow.parquet import read_metadata

    if max_rollouts < 1:
        raise ValueError(f"`max_rollouts` must be at least 1, but got {max_rollouts}.")
    rows = list(islice(read_rows(file, PREDICTION), max_rollouts + 1))
    if not rows:
        raise ValueError(f"{file} must hold at least one rollout, but got none. Predict first.")
    if len(rows) > max_rollouts:
        cut = _problem(rows.pop())
        if cut == _problem(rows[-1]) != _problem(rows[0]):
            rows = [row for row in rows if _problem(row) != cut]
    return rows, int(read_metadata(file).num_rows)


def _problem(row: Row) -> tuple[str, ...]:
    """What the rollouts of a group have in common: dataset, prompt, reference, number, and the prompt's pictures."""
    dataset, prompt, reference = (str(row[name] or "") for name in ("dataset", "prompt", "reference"))
    pictures = json.loads(row["pictures"] or "[]")[: prompt.count(PLACE)]
    return dataset, prompt, reference, str(row["group"]), *(picture["src"] for picture in pictures)


def _credit(row: Row) -> dict[str, dict[str, Any]]:
    """`weights`, `scores` and `fallback` by the name of a method; lists have as many numbers as there are tokens."""
    methods = {"": row["method"]}
    methods |= {name.removeprefix("weights"): name[8:] for name in row if name.startswith("weights.")}
    columns = ("weights", "scores", "fallback")
    return {name: {column: row[column + suffix] for column in columns} for suffix, name in methods.items()}


def _render(rows: Sequence[Row], title: str, num_rows: int) -> tuple[str, int]:
    """The page as HTML, and the number of rollouts that it shows, of `num_rows` that there are."""
    from markupsafe import Markup

    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_problem(row), []).append(row)
    methods = list(dict.fromkeys(name for row in rows for name in _credit(row)))
    rendered_groups: list[dict[str, Any]] = []
    size = number = 0
    for members in groups.values():
        group = _group(members, methods, number)
        size += len(_json(group).encode())
        if rendered_groups and size > _MAX_BYTES:
            break
        rendered_groups.append(group)
        number += len(members)
    program = "".join(map(_template_file, ("draw.js", "use.js")))
    content = rendered(
        "page",
        "tokens",
        title=title,
        data={"methods": methods, "groups": rendered_groups, "largest": LARGEST, "left_out": num_rows - number},
        program=Markup(program),  # noqa: S704  (our own file)
        program_hash=_policy_hash(program),
    )
    return content, number


def _group(rows: Sequence[Row], methods: Sequence[str], first: int) -> dict[str, Any]:
    """A group as the page's program reads it."""
    steps = [_token_steps(row) for row in rows]
    tree, forks = prefix_tree([row["token_ids"] for row in rows], [bool(row["correct"]) for row in rows], steps)
    parts, sources = [], dict[str, int]()  # The pictures, once for the group, and their numbers.
    for k, row in enumerate(rows):
        credit = _credit(row)
        pieces, outside = _pieces(row)
        parts.append(
            {
                "number": first + k + 1,
                "correct": bool(row["correct"]),
                **{name: _short(row[name]) for name in ("status", "reward", "advantage", "finished")},
                "pieces": pieces,
                "outside": outside,
                "credit": [_short(_with_turns(credit.get(name), row)) for name in methods],
                "box": None if row["box_first_token"] is None else [row["box_first_token"], row["box_last_token"]],
                "steps": steps[k],
                "fork": forks.get(k),
                **_turns(row),
                "pictures": _pictures(row, sources),
            }
        )
    group = dict(zip(("dataset", "prompt", "reference"), _problem(rows[0]), strict=False))
    if rows[0]["episode"] is not None:
        group["prompt"] += read_episode(rows[0]["episode"]).opening or ""
    return group | {"rollouts": parts, "tree": tree, "sources": [*sources]}


def _pictures(row: Row, sources: dict[str, int]) -> list[dict[str, Any]]:
    """The pictures of a rollout by the numbers of their `sources`, with saliency in thousandths of the largest one."""
    pictures: list[dict[str, Any]] = json.loads(row["pictures"] or "[]")
    largest = max(
        (score for picture in pictures for score in picture["scores"] or [] if math.isfinite(score)), default=0.0
    )
    for picture in pictures:
        shares = [score / largest if largest and math.isfinite(score) else 0.0 for score in picture.pop("scores") or []]
        picture |= {"source": sources.setdefault(picture.pop("src"), len(sources)), "layers": _short(picture["layers"])}
        picture["shares"] = [round(1000 * share) for share in shares]
    return pictures


def _turns(row: Row) -> dict[str, Any]:
    """The turns of a rollout in an environment: their scores and calls, the turn of each token, and why it ended."""
    if row["episode"] is None:
        return {}
    episode = read_episode(row["episode"])
    turns = [
        {"score": _short(turn.score), "calls": [(c.name[:_CUT], c.status, c.result[:_CUT]) for c in turn.calls]}
        for turn in episode.turns
    ]
    return {"end": episode.end, "turns": turns, "turn_of": row["turns"]}


def _with_turns(credit: dict[str, Any] | None, row: Row) -> dict[str, Any] | None:
    """The credit of a method with sum and mean of the advantages of each turn's tokens, if there are turns."""
    if row["episode"] is None or credit is None or credit["weights"] is None or row["advantage"] is None:
        return credit
    tokens: dict[int, list[float]] = defaultdict(list)
    for turn, weight in zip(row["turns"], credit["weights"], strict=True):
        tokens[turn].append(row["advantage"] * (weight or 0.0))
    turns = [tokens[turn] for turn in range(max(tokens, default=-1) + 1)]
    return credit | {"turns": [[sum(weights), sum(weights) / max(1, len(weights))] for weights in turns]}


def _pieces(row: Row) -> tuple[list[str], list[int]]:
    """The part of the response that each token adds, and the indices of tokens that are outside of the response.

    The first of several tokens that share a character has it. A token outside, such as one that ends the response, is
    shown as it is decoded by itself, and so are those of earlier turns and of an environment's answers.
    """
    places = list(zip(row["token_starts"], row["token_stops"], strict=True))
    turns = row["turns"] or [0] * len(places)
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


def _token_steps(row: Row) -> list[tuple[int, int, Any]]:
    """The first token, the last token and the kind of each labelled step."""
    steps = []
    ranges = list(zip(row["token_starts"], row["token_stops"], strict=True))
    labels = (row[f"step_{name}"] or [] for name in ("starts", "stops", "kinds"))
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


def rendered(name: str, *styles: str, **values: object) -> str:
    """The HTML page of the template of a name; values are escaped.

    Its style sheet is the palette, those of the names in `styles`, and its own.
    """
    import jinja2
    from markupsafe import Markup

    style = "".join(_template_file(f"{part}.css") for part in ("palette", *styles, name))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("grail_lightning.app.views"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_function"] = _json
    own_style = Markup(style)  # noqa: S704  (our own file)
    return environment.get_template(f"{name}.html.j2").render(style=own_style, style_hash=_policy_hash(style), **values)


def _template_file(name: str) -> str:
    return resources.files("grail_lightning.app.views").joinpath("templates", name).read_text(encoding="utf-8")


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
    for row in _read(Path(file), max_rollouts)[0]:
        pieces = _pieces(row)[0]
        ends = [0, *accumulate(map(len, pieces))]
        steps = [Step(start=ends[first], stop=ends[last + 1], kind=kind) for first, last, kind in _token_steps(row)]
        verdict = "right" if row["correct"] else "wrong"
        panels = [
            ShownRollout(
                title=f"{verdict}, {name}",
                text="".join(pieces),
                tokens=list(pairwise(ends)),
                weights=credit["weights"] or [1.0] * len(pieces),
                steps=steps,
            )
            for name, credit in _credit(row).items()
        ]
        pictures.append(heatmap(_problem(row)[1], panels))
    return Image.fromarray(np.concatenate(pictures))
