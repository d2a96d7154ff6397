"""Rollouts with their token credit inside a notebook: HTML without a program, which also shows where none may run."""

from __future__ import annotations

from html import escape
from pathlib import Path

from grail_lightning.views.colours import LARGEST, colour_of
from grail_lightning.views.page import labelled_steps, rollout_parts
from grail_lightning.views.rollouts import read_rollouts


class ShownCredit(str):
    """HTML that a notebook shows. Text of a model is escaped in it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def show_credit(file: str | Path, max_rollouts: int = 6) -> ShownCredit:
    """The first rollouts of a file of predictions, with the weight of each token as its background, for notebooks.

    Orange tokens get more of the advantage than under GRPO, blue ones less, and those without colour as much. Tokens
    with a weight of 1.5 or more are bold. Steps that the task labels as wrong are underlined.

    Args:
        file: A file that `predict` wrote, such as ``predictions.parquet``.
        max_rollouts: The largest number of rollouts.

    Raises:
        ValueError: If the file holds no predictions.
    """
    rollouts, _ = read_rollouts([Path(file)], max_rollouts)
    scale = [_token(f"{weight:.3g}", weight) for weight in (0.0, 0.5, 1.0, 2.0, LARGEST)]
    blocks = [f"<p>weight (1 is GRPO's): {' '.join(scale)}</p>"]
    for rollout in rollouts:
        part = rollout_parts(rollout, [], labelled_steps(rollout.row), None, 0)
        verdict = f"<b>{'✓ right' if part['correct'] else '✗ wrong'}</b>, reward {part['reward']}"
        wrong = {k for first, last, kind in part["steps"] if kind in _WRONG for k in range(first, last + 1)}
        blocks.append(f"<p>{escape(rollout.problem[1])}<br>{verdict}</p>")
        for name, credit in rollout.methods.items():
            pairs = zip(part["pieces"], credit.weights or [1.0] * len(part["pieces"]), strict=True)
            tokens = [_token(piece, weight, k in wrong) for k, (piece, weight) in enumerate(pairs)]
            blocks.append(f"<p>{escape(name)}</p><pre>{''.join(tokens)}</pre>")
    return ShownCredit("\n".join(blocks))


_WRONG = ("slip", "misconception")


def _token(text: str, weight: float, wrong: bool = False) -> str:
    background = ",".join(map(str, colour_of(weight)))
    shown = f'<span style="background-color:rgb({background});color:black" title="{weight:.3g}">{escape(text)}</span>'
    shown = f"<b>{shown}</b>" if weight >= 1.5 else shown  # For readers whose page leaves colours out.
    return f"<u>{shown}</u>" if wrong else shown
