"""One method in one world: its weights and what a step with them gains; then, with the labels, what it finds.

These functions run in processes of their own (`processes`), so they take and return what JSON can hold.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from grail_lightning.app.benchmark.cost import cost_of
from grail_lightning.app.benchmark.detect import detect
from grail_lightning.app.benchmark.gain import gain_of
from grail_lightning.app.benchmark.labels import Labels, read_labels
from grail_lightning.app.benchmark.processes import Report
from grail_lightning.app.benchmark.references import REFERENCES
from grail_lightning.app.benchmark.rollouts import OpenWorld, open_world
from grail_lightning.app.benchmark.subjects import Subject, subject_of
from grail_lightning.app.benchmark.weights import (
    AllWeights,
    DoesNotApply,
    check_applies,
    reads_rewards,
    under_control,
    weigh,
)
from grail_lightning.core.credit.base import TokenCredit
from grail_lightning.core.credit.controls import PermutedRewards, Shuffled
from grail_lightning.core.records.task import Prompt

_WEIGHED, _CONTROLLED, _GAINED = 0.25, 0.5, 0.95  # The shares of the time that are over then.
_BARE = "A bare score of tokens is no credit: no step can be made with it."
_EXAMPLES = 3  # Of each world.


def subject_named(method: str, options: Sequence[str] = ()) -> Subject:
    """The subject of a class with options, or the reference row with this name, such as ``position``."""
    if method in REFERENCES and not options:
        return REFERENCES[method].subject()
    return subject_of(method, options)


def quality(method: str, options: Sequence[str], world: str, batches: int, seed: int, report: Report) -> dict[str, Any]:
    """What a method finds and gains in a world.

    Returns:
        ``figures``, those of the world in the JSON of a result, or None with a ``reason``; ``reads``, ``oracle``; and
        ``examples``.
    """
    begun, subject = time.perf_counter(), subject_named(method, options)
    with open_world(world, batches) as opened:
        try:
            weighted = weigh(subject, opened, seed)
        except DoesNotApply as error:
            return {"figures": None, "reason": str(error), "reads": [], "oracle": False, "examples": []}
        report(_WEIGHED)
        controls = _controls(subject, opened, weighted, seed)
        report(_CONTROLLED)
        figures = _gains(subject, opened, weighted, controls, seed, report)
        labels = read_labels(opened)
        found = detect(weighted, labels)
        reasons = figures.pop("reasons") | found.pop("reasons")
        for name, under in controls.items():
            its = detect(under, labels)
            figures["controls"].setdefault(name, {}).update({key: its[key] for key in ("auroc_rollout", "auroc_forks")})
        examples = _examples(opened, weighted, labels)
    seconds = time.perf_counter() - begun
    figures = found | figures | {"seconds": round(seconds, 1), "reasons": reasons}
    return {"figures": figures, "reads": [*weighted.reads], "oracle": weighted.oracle, "examples": examples}


def cost(method: str, options: Sequence[str], world: str, seed: int, report: Report) -> dict[str, Any]:
    """What a step of training with a method costs in a world: ``figures`` and ``reasons``."""
    subject = subject_named(method, options)
    with open_world(world, 1) as opened:
        if not isinstance(subject.method, TokenCredit):
            return {"figures": None, "reasons": {"cost": _BARE}}
        try:
            check_applies(subject, opened)
            told = cost_of(opened, subject)
        except DoesNotApply as error:
            return {"figures": None, "reasons": {"cost": str(error)}}
    return {"figures": told.figures["cost"], "reasons": told.reasons}


def _controls(subject: Subject, opened: OpenWorld, weighted: AllWeights, seed: int) -> dict[str, AllWeights]:
    """The method under its controls: its weights shuffled, and if it reads rewards, with permuted ones.

    A bare score has none, and a method that is given under a control, or is one.
    """
    method = subject.method
    if not isinstance(method, TokenCredit) or subject.control is not None or isinstance(method, PermutedRewards):
        return {}
    controls = {"Shuffled": under_control(weighted, Shuffled(), opened, seed)}
    # A method with a baseline of its own has another advantage with permuted rewards: that is no control of its tokens.
    if not method.replaces_advantage and reads_rewards(subject, opened, seed):
        controls["PermutedRewards"] = weigh(replace(subject, method=PermutedRewards(method)), opened, seed)
    return controls


def _gains(
    subject: Subject,
    opened: OpenWorld,
    weighted: AllWeights,
    controls: dict[str, AllWeights],
    seed: int,
    report: Report,
) -> dict[str, Any]:
    """The figures of a step, with ``controls`` and ``reasons``."""
    if not isinstance(subject.method, TokenCredit):
        paths = ("gain", "share_of_limit", "gain_beside_baseline", "direction", "noise", "cost")
        return dict.fromkeys(paths) | {"controls": {}, "reasons": dict.fromkeys(paths, _BARE)}

    def done(number: int) -> None:
        report(_CONTROLLED + (_GAINED - _CONTROLLED) * number / len(opened.batches))

    tables = {name: [one.advantages for one in under.batches] for name, under in controls.items()}
    told = gain_of(opened, [one.advantages for one in weighted.batches], tables, seed=seed, done=done)
    figures = told.figures | {"controls": told.figures["controls"] or {}}
    return figures | {"reasons": told.reasons}


def _examples(opened: OpenWorld, weighted: AllWeights, labels: Labels) -> list[dict[str, Any]]:
    """A wrong rollout with each kind of error beside a sound step, and a right one, with their tokens' weights."""
    if weighted.batches[0].effective is None:
        return []
    sound, chosen = labels.kind["sound"].any(1), []
    for error in labels.world.errors:
        chosen += np.flatnonzero(labels.wrong & sound & labels.kind[error].any(1)).tolist()[:1]
    chosen += np.flatnonzero(labels.right & sound).tolist()[: _EXAMPLES - len(chosen)]
    return [_example(opened, weighted, labels, row) for row in dict.fromkeys(chosen)]


def _example(opened: OpenWorld, weighted: AllWeights, labels: Labels, row: int) -> dict[str, Any]:
    number, place = divmod(row, len(opened.batches[0]))
    one = weighted.batches[number]
    assert one.effective is not None
    length, decode = int(one.batch.valid_lengths[place]), opened.policy.tokenizer.decode
    sampled = one.batch.response_mask[place, :length].tolist()
    steps = [
        {"start": int(labels.begin[row, s]), "stop": int(labels.stop[row, s]), "kind": name}
        for name, kind in labels.kind.items()
        for s in np.flatnonzero(kind[row])
    ]
    return {
        "world": opened.world.name,
        "prompt": _text(one.batch.prompts[place]),
        "outcome": "right" if labels.right[row] else "wrong",
        "tokens": [decode([token]) for token in one.batch.response_ids[place, :length].tolist()],
        "weights": _of_sampled(one.effective[place, :length], sampled),
        "advantages": _of_sampled(one.advantages[place, :length], sampled),
        "steps": sorted(steps, key=lambda step: step["start"]),
    }


def _of_sampled(values: Tensor, sampled: Sequence[bool]) -> list[float | None]:
    """The values ``[T]`` of tokens; None for those that an environment put in."""
    return [round(value, 4) if own else None for value, own in zip(values.tolist(), sampled, strict=True)]


def _text(prompt: Prompt) -> str:
    """What is asked: plain text, or what stands last in a conversation."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    content = prompt.messages[-1]["content"]
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
