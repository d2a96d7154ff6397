"""What to set where a run does not fit: the effect of each change alone, and changes with which it fits.

Nothing is estimated here: the run is planned anew with each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from jsonargparse import Namespace

from grail_lightning.app.plan.memory import Plan, peaks
from grail_lightning.core.engines.hf.engine import HFEngine
from grail_lightning.core.policy.source import LoRA

_SHORTEST = 256  # Tokens of a response, and columns of logits, below which nothing is proposed.


class Change(NamedTuple):
    """Options of ``fit`` that lower the memory of a run."""

    command: str
    """As on a command line."""
    values: Mapping[str, Any]
    """Parsed, by their names."""


class Lever(NamedTuple):
    """One thing of a run that can be changed."""

    price: str
    exact: bool  # Whether the results stay the same, but for rounding.
    changes: list[Change]  # The smallest change first.


class Effect(NamedTuple):
    """What a change does to a run alone."""

    change: Change
    price: str
    saved: Mapping[str, float]  # Bytes, by each phase that exceeds the memory.


def levers(fit: Namespace, row: int, ranks: int) -> list[Lever]:
    """What can be changed in a run on so many ranks, whose longest row has so many tokens."""
    model, cuts = fit.model, _halved(fit.model.execution.token_budget, row)
    loading, optimizer = model.loading, model.optimizer
    found = [
        Lever("more passes in the update", True, [_option("model.execution.token_budget", size) for size in cuts]),
        Lever("sampling in more calls", True, [_cache(fit, size) for size in _halved(_cache_tokens(fit), row)]),
        Lever(
            "more passes through the head",
            True,
            [_option("model.loading.chunk_tokens", size) for size in _halved(loading.chunk_tokens, _SHORTEST)],
        ),
    ]
    if not loading.gradient_checkpointing:
        change = _option("model.loading.gradient_checkpointing", True)
        found.append(Lever("a third more computing in the update", True, [change]))
    if ranks > 1 and "ModelParallel" not in str(fit.trainer.strategy):
        found.append(Lever("weights are gathered", True, [_option("trainer.strategy", "ModelParallelStrategy")]))
    if optimizer.class_path.endswith(".AdamW"):
        found.append(Lever("needs torchao; moments in 8 bits", False, [_in_8_bits(optimizer.init_args)]))
    if loading.dtype == "float32":
        values = {"model.loading.dtype": "bfloat16", "trainer.precision": "bf16-true"}
        change = Change(" ".join(f"--{name}={value}" for name, value in values.items()), values)
        found.append(Lever("weights in bfloat16, float32 masters of those trained", False, [change]))
    if loading.lora is None:
        adapters = _options(**asdict(LoRA()))
        change = Change(f"--model.loading.lora.rank={adapters.rank}", {"model.loading.lora": adapters})
        found.append(Lever("adapters alone are trained, at ten times the learning rate", False, [change]))
    lengths = _halved(model.sampling.max_response_length, _SHORTEST)
    changes = [_option("model.sampling.max_response_length", size) for size in lengths]
    found.append(Lever("longer responses are cut", False, changes))
    return [lever for lever in found if lever.changes]


def effects(fit: Namespace, ways: Iterable[Lever], plan: Callable[[Namespace], Plan], room: float) -> list[Effect]:
    """What each lever saves alone in the phases that exceed `room` bytes, the largest effect first.

    Of a lever it is the smallest change after which nothing, or as little as possible, is too much.
    """
    before = peaks(plan(fit))
    found = []
    for lever in ways:
        after = [peaks(plan(applied(fit, [change]))) for change in lever.changes]
        best = min(range(len(after)), key=lambda k: _excess(after[k], room))
        saved = {phase: size - after[best][phase] for phase, size in before.items() if size >= room}
        found.append(Effect(lever.changes[best], lever.price, saved))
    helpful = [effect for effect in found if any(size > 0 for size in effect.saved.values())]
    return sorted(helpful, key=lambda effect: -sum(effect.saved.values()))


def fitting(
    fit: Namespace, ways: Iterable[Lever], plan: Callable[[Namespace], Plan], room: float
) -> list[Change] | None:
    """Changes with which each phase fits into `room` bytes; None if there are none.

    Those that leave the results as they are come first, each time the one with the largest effect. Then none is larger
    than needed beside the others.
    """

    def left(changes: Mapping[int, Change]) -> float:
        return _excess(peaks(plan(applied(fit, changes.values()))), room)

    ways, chosen = list(ways), dict[int, Change]()
    for exact in (True, False):
        while (missing := left(chosen)) > 0:
            open_ways = [k for k, lever in enumerate(ways) if k not in chosen and lever.exact is exact]
            choices = [(k, change) for k in open_ways for change in ways[k].changes]
            best = min(choices, key=lambda choice: left(chosen | dict([choice])), default=None)
            if best is None or left(chosen | dict([best])) >= missing:
                break
            chosen |= dict([best])
    if left(chosen) > 0:
        return None
    for k in list(chosen):
        others = {other: change for other, change in chosen.items() if other != k}
        smaller = (others | {k: change} for change in ways[k].changes)
        chosen = others if not left(others) else next(changes for changes in smaller if not left(changes))
    return list(chosen.values())


def _excess(sizes: Mapping[str, float], room: float) -> float:
    """Bytes above `room`, of all phases together."""
    return sum(max(0.0, size - room) for size in sizes.values())


def applied(fit: Namespace, changes: Iterable[Change]) -> Namespace:
    """The options with these changes."""
    changed = fit.clone()
    for change in changes:
        for name, value in change.values.items():
            changed[name] = value
    return changed


def _halved(size: int, least: int) -> list[int]:
    """A size halved once, twice and so on, while it is at least `least`."""
    return [size >> k for k in range(1, size.bit_length()) if size >> k >= least]


def _options(**values: Any) -> Namespace:
    return Namespace(**values)  # type: ignore[no-untyped-call]


def _option(name: str, value: bool | int | str) -> Change:
    return Change(f"--{name}={str(value).lower() if isinstance(value, bool) else value}", {name: value})


def _cache_tokens(fit: Namespace) -> int:
    """Tokens in the cache of `HFEngine`; 0 with other engines, whose memory is not planned."""
    engine = fit.model.engine
    if engine is None:
        return HFEngine().cache_tokens
    return int(engine.init_args.cache_tokens) if engine.class_path.endswith("HFEngine") else 0


def _cache(fit: Namespace, size: int) -> Change:
    engine = fit.model.engine.clone() if fit.model.engine else _options(class_path="HFEngine", init_args=_options())
    engine.init_args.cache_tokens = size
    return Change(f"--model.engine=HFEngine --model.engine.cache_tokens={size}", {"model.engine": engine})


def _in_8_bits(options: Namespace) -> Change:
    kept = {name: options.get(name) for name in ("lr", "weight_decay") if options.get(name) is not None}
    made = _options(class_path="torchao.optim.AdamW8bit", init_args=_options(**kept))
    words = [f"--model.optimizer={made.class_path}", *(f"--model.optimizer.{k}={v}" for k, v in kept.items())]
    return Change(" ".join(words), {"model.optimizer": made})
