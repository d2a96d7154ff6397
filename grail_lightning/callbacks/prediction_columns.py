"""The columns of the Parquet file of predictions."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grail_lightning.answers import Alignment
from grail_lightning.callbacks.hooks import rollouts_of
from grail_lightning.callbacks.records import ROLLOUT_COLUMNS, encodable, response_ids, rollout_columns
from grail_lightning.credit import TokenCredit, TokenWeights
from grail_lightning.grading import align_rows, labelled_steps
from grail_lightning.step.advantages import effective_weights
from grail_lightning.step.outputs import StepOutput
from grail_lightning.tasks.base import Prompt

if TYPE_CHECKING:
    from grail_lightning.module import GrailModule

_COLUMNS = {
    **ROLLOUT_COLUMNS,
    "token_ids": "list<int32>",
    "tokens": "list<string>",
    "token_starts": "list<int32>",
    "token_stops": "list<int32>",
    "method": "string",
    "weights": "list<float32>",
    "scores": "list<float32>",
    "fallback": "bool",
    "box_start": "int32",
    "box_stop": "int32",
    "box_first_token": "int32",
    "box_last_token": "int32",
    "step_starts": "list<int32>",
    "step_stops": "list<int32>",
    "step_kinds": "list<string>",
}
_OF_A_METHOD = {"weights": "list<float32>", "scores": "list<float32>", "fallback": "bool"}


def prediction_types(compared: Sequence[str]) -> dict[str, str]:
    """The names and types of the columns, with those of the methods that are compared with the first one."""
    return _COLUMNS | {f"{column}.{name}": kind for name in compared for column, kind in _OF_A_METHOD.items()}


def prediction_columns(
    output: StepOutput, module: GrailModule, method: str, compared: Mapping[str, TokenWeights]
) -> dict[str, list[Any]]:
    """The columns of a batch, ``B`` values each.

    Args:
        output: The rollouts, with the weights of the configured credit method.
        module: The module, whose tokenizer decodes.
        method: The name of the configured credit method.
        compared: The weights of further methods by name.
    """
    batch = rollouts_of(output)
    lengths, ids = batch.response_lengths.tolist(), response_ids(output)
    columns = rollout_columns(output)
    columns["token_ids"] = ids
    columns["tokens"] = [[encodable(module.tokenizer.decode([token])) for token in row] for row in ids]
    columns["method"] = [method] * len(batch)
    for suffix, weights in {"": output.weights, **{f".{name}": w for name, w in compared.items()}}.items():
        shown = None if weights is None else effective_weights(batch.advantages, weights)
        columns[f"weights{suffix}"] = _rows(shown, lengths)
        columns[f"scores{suffix}"] = _rows(None if weights is None else weights.scores, lengths)
        columns[f"fallback{suffix}"] = [None] * len(batch) if weights is None else weights.fallback.tolist()
    alignments = align_rows(batch, module.tokenizer)
    return columns | _spans(output, alignments) | _steps(alignments, batch.prompts)


def method_names(methods: Sequence[TokenCredit]) -> list[str]:
    """A name for each method: its class, with the options in which methods of one class differ.

    ``["GRAIL w_max=5.0", "GRAIL w_max=3.0", "HighEntropy"]``. A number replaces options that cannot be read back.
    """
    classes = [type(method).__name__ for method in methods]
    options = [_options(method) for method in methods]
    names = []
    for kind, own in zip(classes, options, strict=True):
        others = [found for name, found in zip(classes, options, strict=True) if name == kind]
        differing = [name for name in own if any(found.get(name) != own[name] for found in others)]
        names.append(" ".join([kind, *(f"{name}={own[name]}" for name in differing)]))
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def _options(method: TokenCredit) -> dict[str, Any]:
    """The constructor's options that the object keeps under the same names."""
    names = inspect.signature(type(method)).parameters
    return {name: vars(method)[name] for name in names if name in vars(method)}


def _rows(values: Tensor | None, lengths: list[int]) -> list[list[float] | None]:
    """``[B, T]`` as lists without padding."""
    if values is None:
        return [None] * len(lengths)
    return [row[:n] for row, n in zip(values.detach().float().tolist(), lengths, strict=True)]


def _spans(output: StepOutput, alignments: Sequence[Alignment]) -> dict[str, list[Any]]:
    """The character ranges of each token and of the answer, and the token range of the answer."""
    names = ("token_starts", "token_stops", "box_start", "box_stop", "box_first_token", "box_last_token")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    masks = (output.weights and output.weights.answer) or output.batch.answer
    for row, aligned in enumerate(alignments):
        tokens = [] if masks is None else torch.nonzero(masks.whole[row]).flatten().tolist()
        # The answer whose tokens the mask marks. The choice among several was made when the mask was made.
        answers = output.batch.prompts[row].task.answer_spans(aligned.text) if tokens else []
        marked = [a for a in answers if aligned.overlapping(a.start, a.stop) == tokens]
        box = (marked[-1].start, marked[-1].stop) if marked else (None, None)
        ends = (tokens[0], tokens[-1]) if tokens else (None, None)
        found = (list(aligned.starts), list(aligned.stops), *box, *ends)
        for name, value in zip(names, found, strict=True):
            columns[name].append(value)
    return columns


def _steps(alignments: Sequence[Alignment], prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The labelled steps of each response: ranges of characters and kinds; null where the task cannot label."""
    found = [labelled_steps(aligned.text, prompt) for aligned, prompt in zip(alignments, prompts, strict=True)]
    return {
        "step_starts": [None if steps is None else [step.start for step in steps] for steps in found],
        "step_stops": [None if steps is None else [step.stop for step in steps] for steps in found],
        "step_kinds": [None if steps is None else [step.kind for step in steps] for steps in found],
    }
