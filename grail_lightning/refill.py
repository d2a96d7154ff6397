"""Dynamic sampling: groups without a difference make way for groups of further prompts.

Shapes: ``B`` rows in ``K`` groups, ``T`` response tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from grail_lightning.ranks import over_ranks, sums, world_size
from grail_lightning.rollout import AnswerMasks, GradedAnswer, Prompt, RolloutBatch

V = TypeVar("V", bound=GradedAnswer)


def refill(
    batch: RolloutBatch,
    verdicts: list[V],
    sample: Callable[[list[Prompt], int], tuple[RolloutBatch, list[V]]],
    loader: Any,
    rounds: int,
) -> tuple[RolloutBatch, list[V], dict[str, float]]:
    """Replace groups that are all right or all wrong, as far as `rounds` further samplings allow.

    The further prompts are the training loader's next ones, so that a run resumes where it was. Correctness decides,
    not the reward: a shaped reward tells responses apart that are right or wrong alike. All ranks make the same rounds.

    Args:
        batch: ``B`` graded rows.
        verdicts: ``B`` of them.
        sample: Draws and grades groups for prompts; gets the number of the round, too.
        loader: The training loader.
        rounds: Most further samplings; 0 leaves everything as it is.

    Returns:
        Batch and verdicts of as many groups as before, and what to log, over all ranks.

    Raises:
        ValueError: If the loader cannot give further prompts.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    if not rounds:
        return batch, verdicts, {}
    check_loader(loader, rounds)
    kept = verdicts
    drawn, right, made = float(len(uniform_groups(batch))), float(_correct(batch).sum()), 0
    for made in range(1, rounds + 1):
        dead = uniform_groups(batch)
        most = int(over_ranks(dead.sum().to(batch.input_ids.device), "max"))
        if not most:
            made -= 1
            break
        fresh, more = sample(loader.take(most * world_size()), made)
        drawn, right = drawn + len(uniform_groups(fresh)), right + float(_correct(fresh).sum())
        batch, kept = _replace(batch, kept, fresh, more)
    total = sums({"drawn": drawn, "right": right, "kept": float(len(uniform_groups(batch)))})
    size = len(batch) / max(len(uniform_groups(batch)), 1)
    return (
        batch,
        kept,
        {
            "refill/rounds": float(made),
            "refill/drawn_groups": total["drawn"],
            "refill/dropped_groups": total["drawn"] - total["kept"],
            "refill/accuracy_drawn": total["right"] / max(total["drawn"] * size, 1),
        },
    )


def check_loader(loader: Any, rounds: int) -> None:
    """Whether the loader can give what further samplings need; asked before the first one, too.

    Raises:
        ValueError: If not.
    """
    if rounds and not hasattr(loader, "take"):
        raise ValueError(
            "`objective.refill_rounds` needs a training loader that can `take` further prompts, but got "
            f"{type(loader).__name__}. Use a data module of grail_lightning.data, or set it to 0."
        )


def uniform_groups(batch: RolloutBatch) -> Tensor:
    """``[K]`` bool on the CPU: groups whose rows are all right or all wrong, in the order of the rows."""
    if not len(batch):
        return torch.zeros(0, dtype=torch.bool)
    correct = _correct(batch).reshape(len(torch.unique(batch.group)), -1)
    return correct.all(1) | ~correct.any(1)


def join(first: RolloutBatch, second: RolloutBatch) -> RolloutBatch:
    """The rows of both, padded to common widths."""
    return dataclasses.replace(first, **{f.name: _join(f.name, first, second) for f in dataclasses.fields(first)})


def _correct(batch: RolloutBatch) -> Tensor:
    assert batch.correct is not None
    return batch.correct.cpu()


def _replace(
    batch: RolloutBatch, verdicts: list[V], fresh: RolloutBatch, more: list[V]
) -> tuple[RolloutBatch, list[V]]:
    """The first of the fresh live groups in the places of dead ones; they take over their row and group numbers."""
    places = uniform_groups(batch).nonzero().flatten()
    useful = (~uniform_groups(fresh)).nonzero().flatten()[: len(places)]
    places = places[: len(useful)]
    if not len(places):
        return batch, verdicts
    size = len(batch) // len(uniform_groups(batch))
    within = torch.arange(size)
    order = torch.arange(len(batch))
    old = (places[:, None] * size + within).flatten()
    new = (useful[:, None] * size + within).flatten()
    order[old] = len(batch) + torch.arange(len(old))
    everything = [*verdicts, *(more[k] for k in new.tolist())]
    joined = join(batch, fresh.select(new)).select(order)
    return joined.replace(group=batch.group, row=batch.row), [everything[k] for k in order.tolist()]


def _join(name: str, first: Any, second: Any) -> Any:
    prompt = max(first.prompt_width, second.prompt_width)
    response = max(first.response_ids.shape[1], second.response_ids.shape[1])

    def widen(batch: RolloutBatch, value: Tensor) -> Tensor:
        if value.ndim < 2:
            return value
        left = prompt - batch.prompt_width if name in ("input_ids", "attention_mask") else 0
        return F.pad(value, (left, response - batch.response_ids.shape[1]))

    def both(one: Any, other: Any) -> Any:
        match one:
            case Tensor():
                return torch.cat([widen(first, one), widen(second, other)])
            case list():
                return one + other
            case AnswerMasks():
                names = [f.name for f in dataclasses.fields(one)]
                return AnswerMasks(**{n: both(getattr(one, n), getattr(other, n)) for n in names})
            case dict():
                # Tasks may differ in the parts of their rewards; NaN is no opinion.
                rows = {key: (_or_nan(one, key, first), _or_nan(other, key, second)) for key in one | other}
                return {key: torch.cat(parts) for key, parts in rows.items()}
            case _:
                return one

    return both(getattr(first, name), getattr(second, name))


def _or_nan(values: dict[str, Tensor], key: str, batch: RolloutBatch) -> Tensor:
    missing = torch.full((len(batch),), torch.nan, device=batch.input_ids.device)
    return values.get(key, missing)
