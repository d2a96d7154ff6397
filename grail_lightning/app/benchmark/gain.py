r"""What one step with a credit method gains over uniform credit, and what remains of it beside a lower baseline.

The gradient of uniform credit (rewards less the group's mean, sums of tokens) is an unbiased estimate of the gradient
of the expected reward. So the product of a method's gradient ``g`` with the gradient ``u`` of uniform credit on
*another* batch estimates what a step along ``g`` gains:

.. math:: \text{gain}_\text{SGD} = \frac{E[g_i \cdot u_j] / \sqrt{E|g|^2}}{E[u_i \cdot u_j] / \sqrt{E|u|^2}}, \qquad
          \text{gain}_\text{Adam} = \frac{E[(g_i / s_g) \cdot u_j]}{E[(u_i / s_u) \cdot u_j]}, \qquad i \ne j

with ``s`` the root mean square of each entry over batches. The page "What credit by token is worth" explains the
figures.

Shapes: ``N`` batches, ``D`` draws of the bootstrap, ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr, stdtrit
from torch import Tensor

from grail_lightning.app.benchmark.compared import check_references, on_every_token, read_references, uniform_batches
from grail_lightning.app.benchmark.gradients import Products, References, policy_gradients, products
from grail_lightning.app.benchmark.rollouts import OpenWorld
from grail_lightning.core.credit.base import CreditContext, TokenWeights, token_advantages
from grail_lightning.core.credit.controls import Balanced
from grail_lightning.core.rollout.batch import RolloutBatch

Interval = list[float]
"""``[estimate, low, high]``; an interval is one of 95 %."""
OPTIMISERS = ("sgd", "adam")
DRAWS = 2000
FEWEST = 8
"""The number of batches below which nothing is told."""
_HUGE = 1e9  # In place of infinity, so that percentiles can be taken.


@dataclass(frozen=True, kw_only=True)
class Told:
    """Figures of a method, an interval or None each, and the reason of each None by its dotted path."""

    figures: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


# --- figures of each draw ---------------------------------------------------------------------------------------------


def resampled(number: int, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """``[1 + D, N]`` float64: how often each batch counts in the sample itself, and in D draws with replacement."""
    counts = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), size=draws)
    return torch.cat([torch.ones(1, number, dtype=torch.float64), torch.from_numpy(counts).double()])


def of_pairs(products: Tensor, draws: Tensor) -> Tensor:
    """``[D]``: the mean product of two different batches ``[N, N]``, for each draw of weights ``[D, N]``."""
    off = products - products.diag().diag()
    number = draws.sum(1)
    return ((draws @ off) * draws).sum(1) / (number.square() - draws.square().sum(1))


def gains(ours: Products, uniform: Products, draws: Tensor) -> dict[str, Tensor]:
    """The gain of a step for each draw ``[D]`` by the optimiser; infinite where uniform credit itself gains nothing."""

    def steps(products: Products) -> dict[str, Tensor]:
        power = (draws @ products.power) / draws.sum(1)
        along, adam = (of_pairs(table, draws) for table in (products.along, products.adam))
        return {"sgd": along / power.clamp(min=0).sqrt(), "adam": adam}

    own, base = steps(ours), steps(uniform)
    # Without a gain of uniform credit its ratio has no meaning, and any gain is possible.
    return {o: torch.where(base[o] > 0, own[o] / base[o], torch.inf * own[o].sign()) for o in OPTIMISERS}


def direction(ours: Products, uniform: Products, draws: Tensor) -> Tensor:
    """``[D]``: the cosine of the mean gradients, 0 where one of them cannot be told from 0."""
    along, own, base = (of_pairs(table, draws) for table in (ours.along, ours.own, uniform.own))
    return (along / (own.clamp(min=0) * base.clamp(min=0)).sqrt()).nan_to_num(nan=0.0).clamp(-1, 1)


def signal_share(ours: Products, draws: Tensor) -> Tensor:
    """``[D]``: the squared norm of the mean gradient over that of one batch, ``1 / (1 + noise)``."""
    return of_pairs(ours.own, draws) / ((draws @ ours.power) / draws.sum(1))


# --- intervals --------------------------------------------------------------------------------------------------------


def interval(values: Tensor, number: int) -> Interval | None:
    r"""A figure with its 95 % interval, from its values ``[1 + D]`` by `resampled`; None if one of them is not finite.

    The limits are the expanded percentiles of the bootstrap, of the levels
    :math:`\Phi(\pm\sqrt{N / (N - 1)} \, t_{N - 1})` in place of 0.025 and 0.975: plain percentiles are too narrow by
    Student's factor where there are few batches. ``tests/app/benchmark/test_gain.py`` measures their coverage.

    Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015), section 4.
    """
    level = float(ndtr(math.sqrt(number / (number - 1)) * stdtrit(number - 1, 0.025)))
    drawn = values[1:].nan_to_num(nan=torch.nan, posinf=_HUGE, neginf=-_HUGE)
    # A draw in which uniform credit gains nothing may have any value: half of them count on either side.
    either_side = torch.where(torch.arange(len(drawn)) % 2 == 0, _HUGE, -_HUGE).to(drawn)
    drawn = torch.where(drawn.isnan(), either_side, drawn)
    low, high = (float(drawn.quantile(q)) for q in (level, 1 - level))
    found = [float(values[0]), low, high]
    return found if all(abs(x) < _HUGE for x in found) else None  # NaN is not.


# --- the figures of a method ------------------------------------------------------------------------------------------

_NOISY = "In these batches the gradient of {} cannot be told from noise. More batches may help."
_NONE = "The method gives no token an advantage."


def gain_figures(
    credits: Mapping[str, Products], references: References | None = None, *, seed: int = 0, draws: int = DRAWS
) -> Told:
    """What a step with a method gains: the keys `gain` to `noise` and `controls` of a result.

    Args:
        credits: The products of ``method``, ``uniform`` and ``balanced``, the method with the praise and blame of
            uniform credit, and of the method's controls by their names.
        references: The products of lower baselines and of the limit, of at least as many batches; None without any.
        seed: Of the bootstrap over batches.
        draws: The number of its draws.
    """
    method, uniform = credits["method"], credits["uniform"]
    number = len(uniform.power)
    told = Told()
    if number < FEWEST:
        return _nothing(told, _few(number))
    if not bool((method.power > 0).any()):
        return _nothing(told, _NONE)
    sets = resampled(number, draws, seed)
    own = gains(method, uniform, sets)
    _tell(told, "gain", own, number, _NOISY.format("uniform credit"))
    beside: dict[str, dict[str, Tensor]] = {}
    if "balanced" in credits:
        balanced = gains(credits["balanced"], uniform, sets)
        beside["balanced"] = {o: balanced[o] - 1 for o in OPTIMISERS}
    told.figures["share_of_limit"] = dict.fromkeys(OPTIMISERS)
    if references is None or references.number < number:
        few = "There are no reference gradients of so many batches."
        why = "This world has no reference gradients." if references is None else few
        told.reasons.update({"share_of_limit": why, "gain_beside_baseline.best_constant": why})
    else:
        constants, limits = (best_gains(references, kind, number, sets) for kind in ("constants", "limits"))
        beside["best_constant"] = {o: own[o] - constants[o] for o in OPTIMISERS}
        if limits:
            # Of a limit that is no gain nothing can be a share.
            room = {o: limits[o] - 1 if limits[o][0] > 1 else limits[o] * torch.nan for o in OPTIMISERS}
            share = {o: (own[o] - 1) / room[o] for o in OPTIMISERS}
            _tell(told, "share_of_limit", share, number, _NOISY.format("the limit"))
        else:
            told.reasons["share_of_limit"] = "This world has no resampled values."
    told.figures["gain_beside_baseline"] = dict.fromkeys(("balanced", "best_constant"))
    for name, differences in beside.items():
        _tell(told, f"gain_beside_baseline.{name}", differences, number, _NOISY.format("uniform credit"))
    _tell_direction(told, method, uniform, sets)
    told.figures["controls"] = {}
    for name in [name for name in credits if name not in ("method", "uniform", "balanced")]:
        ratio = gains(credits[name], uniform, sets)
        told.figures["controls"][name] = {}
        _tell(told, f"controls.{name}.gain", ratio, number, _NOISY.format(name))
    return told


def best_gains(references: References, kind: str, number: int, sets: Tensor) -> dict[str, Tensor]:
    """The gains of each draw of the best reference of a kind by each optimiser; empty without one.

    The best one is that of all batches, and its gains are those of the first `number` of them.
    """
    rows: Mapping[str, Products] = getattr(references, kind)
    if not rows:
        return {}
    best = best_of(references, kind)
    cut = references.first(number)
    return {o: gains(getattr(cut, kind)[best[o]], cut.uniform, sets)[o] for o in OPTIMISERS}


def best_of(references: References, kind: str) -> dict[str, str]:
    """The name of the best reference of a kind, `constants` or `limits`, by each optimiser."""
    once = torch.ones(1, references.number, dtype=torch.float64)
    rows: Mapping[str, Products] = getattr(references, kind)
    found = {name: gains(one, references.uniform, once) for name, one in rows.items()}
    return {o: max(found, key=lambda name: float(found[name][o])) for o in OPTIMISERS}


def _few(number: int) -> str:
    return f"A gain needs at least {FEWEST} batches, but there are {number}."


def _nothing(told: Told, reason: str) -> Told:
    names = ("gain", "share_of_limit", "gain_beside_baseline", "direction", "noise", "controls")
    return Told(figures=dict.fromkeys(names), reasons=told.reasons | dict.fromkeys(names, reason))


def _tell(told: Told, path: str, values: Mapping[str, Tensor], number: int, reason: str) -> None:
    """Put the intervals of both optimisers at a dotted path, and reasons where there are none."""
    *parents, last = path.split(".")
    place = told.figures
    for parent in parents:
        place = place[parent]
    place[last] = {o: interval(values[o], number) for o in OPTIMISERS}
    told.reasons.update({f"{path}.{o}": reason for o in OPTIMISERS if place[last][o] is None})


def _tell_direction(told: Told, method: Products, uniform: Products, sets: Tensor) -> None:
    """The cosine with the gradient of the expected reward, and the noise of one batch over the signal."""
    number = len(uniform.power)
    cosine = interval(direction(method, uniform, sets), number)
    share = signal_share(method, sets)
    noisy = float(share[0]) <= 0 or float(of_pairs(uniform.own, sets[:1])[0]) <= 0
    known = interval(share, number)
    told.figures["direction"] = None if noisy else cosine
    told.figures["noise"] = None
    if not noisy and known is not None and known[1] > 0:
        told.figures["noise"] = [1 / known[0] - 1, 1 / known[2] - 1, 1 / known[1] - 1]
    for name in ("direction", "noise"):
        if told.figures[name] is None:
            told.reasons[name] = _NOISY.format("the method")


# --- a method in a world ----------------------------------------------------------------------------------------------


def gain_of(
    opened: OpenWorld,
    method: Sequence[Tensor],
    controls: Mapping[str, Sequence[Tensor]] | None = None,
    *,
    seed: int = 0,
    done: Callable[[int], None] | None = None,
) -> Told:
    """What a step with a method gains in a world: `gain_figures`, and which references are the best ones as `best`.

    Args:
        opened: The world.
        method: The token advantages ``[B, T]`` of the method on each batch.
        controls: Those of its controls, by their names.
        seed: Of the bootstrap over batches.
        done: Called with the number of finished batches after each of them.

    Raises:
        ValueError: If the shipped references are not those of this policy and these rollouts.
    """
    if len(method) < FEWEST:
        return _nothing(Told(), _few(len(method)))
    uniform = uniform_batches(opened)
    credits = {"uniform": [*map(on_every_token, uniform)], "method": method}
    credits["balanced"] = [
        balanced(own, batch, opened.context(number, seed))
        for number, (own, batch) in enumerate(zip(method, uniform, strict=True))
    ]
    found = policy_gradients(opened.policy, opened.batches, credits | dict(controls or {}), done=done)
    tables = {name: products(one, found["uniform"]) for name, one in found.items()}
    references = read_references(opened.world)
    if references is not None and references.number >= len(uniform):
        check_references(references, tables["uniform"], opened.world)
    told = gain_figures(tables, references, seed=seed)
    if references is not None:
        told.figures["best"] = {kind: best_of(references, kind) for kind in ("constants", "limits")}
    return told


def balanced(advantages: Tensor, uniform: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: token advantages scaled as by `Balanced`, with the praise and blame of uniform credit's `uniform`."""
    whole = TokenWeights.whole(advantages, uniform.response_mask)
    return token_advantages(uniform.advantages, Balanced()(whole, uniform, context))
