"""The plan of a run as a table, and as plain values for JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grail_lightning.plan.advice import Advice
from grail_lightning.plan.capacity import SCORED, Capacity
from grail_lightning.plan.seconds import Rates
from grail_lightning.plan.settings import Settings
from grail_lightning.plan.shapes import Shapes
from grail_lightning.runtime.writable import in_units

GIB = 2**30
COLUMNS = 120
STRATEGIES = {"single": "", "ddp": " DDP", "fsdp2": " FSDP2"}


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The plans of a run on several numbers of devices.

    Attributes:
        settings: The options of the run.
        source: Where the model's config comes from.
        shapes: The numbers of parameters.
        rates: The rates of a device.
        memory: Bytes of a device.
        reserve: The share of it that is left free.
        plans: A plan for each number of devices.
        advice: For numbers of devices on which it does not fit.
    """

    settings: Settings
    source: str
    shapes: Shapes
    rates: Rates
    memory: int
    reserve: float
    plans: list[Capacity]
    advice: dict[int, Advice]

    def fits(self, plan: Capacity) -> bool:
        """Whether a plan leaves the reserve free."""
        return plan.peak.total <= self.memory * (1 - self.reserve)


def lines(plans: Plans) -> Iterator[str]:
    """The lines of the table, and of what is said about it."""
    yield from _head(plans)
    yield ""
    yield from _columns(plans)
    yield ""
    for said in (*_advice(plans), *_assumptions(plans)):
        yield from textwrap.wrap(said, COLUMNS, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _head(plans: Plans) -> Iterator[str]:
    settings, shapes = plans.settings, plans.shapes
    execution, loading = settings.execution, settings.loading
    trained = "all" if shapes.trainable == shapes.parameters else _count(shapes.trainable)
    yield f"{settings.policy} (config: {plans.source}): {_count(shapes.parameters)} parameters, {trained} trained"
    yield (
        f"{settings.prompts_per_batch} prompts x {execution.group_size} rollouts; prompts of {settings.prompt_tokens} "
        f"and responses of {settings.sampling.max_response_length} tokens at most"
    )
    yield (
        f"{settings.credit.name}, {execution.steps_per_batch} optimiser steps a batch, "
        f"{settings.optimizer_name.rpartition('.')[2]}, precision {settings.precision}"
    )
    trees = plans.plans[-1].micro.trees
    attention = loading.attention.replace("auto", "sdpa") + (f" ({trees} in prefix trees)" if trees else "")
    blocks = "checkpointed" if loading.gradient_checkpointing else "not checkpointed"
    cached = "another engine" if settings.cache_tokens is None else f"cache_tokens {settings.cache_tokens}"
    yield f"token_budget {execution.token_budget}, {cached}, attention {attention}, blocks {blocks}"


def _columns(plans: Plans) -> Iterator[str]:
    """One column for each number of devices."""
    columns = plans.plans
    unit = "GiB" if max(plan.peak.total for plan in columns) >= GIB else "MiB"
    yield _row(f"{unit} of each {_device(plans)}", [f"{plan.ranks}{STRATEGIES[plan.strategy]}" for plan in columns])
    always = list(dict.fromkeys(part for plan in columns for part in _throughout(plan)))
    for part in always:
        yield _row(f"  {part}", [_size(_throughout(plan).get(part), unit) for plan in columns])
    for name in dict.fromkeys(name for plan in columns for name in plan.phases):
        found = [plan.phases[name].parts if name in plan.phases else {} for plan in columns]
        for part in dict.fromkeys(part for parts in found for part in parts):
            if part not in always:
                yield _row(f"  {name}: {part}", [_size(parts.get(part), unit) for parts in found])
        yield _row(f"peak of {name}", [_size(sum(parts.values()) or None, unit) for parts in found])
    yield _row(f"fits {plans.memory / GIB:.0f} GiB", ["yes" if plans.fits(plan) else "NO" for plan in columns])
    yield _row("a checkpoint on disk", [_size(plan.checkpoint, unit) for plan in columns])
    for name in columns[0].seconds:
        yield _row(f"seconds of {name}", [_seconds(plan.seconds[name]) for plan in columns])
    yield _row("seconds a batch", [_seconds(sum(plan.seconds.values())) for plan in columns])


def _advice(plans: Plans) -> Iterator[str]:
    for ranks, advice in plans.advice.items():
        options = " ".join(map(str, advice.changes))
        peak = advice.capacity.peak
        reached = f"{_size(peak.total, 'GiB')} GiB in {peak.name}"
        devices = f"{ranks} {_device(plans)}{'' if ranks == 1 else 's'}"
        if advice.fits:
            yield f"{devices}: fits ({reached}) with {options}"
        else:
            tried = f", not even with {options}" if options else ""
            yield f"{devices}: does not fit{tried} ({reached}). Take more devices, or shorter rows."


def _assumptions(plans: Plans) -> Iterator[str]:
    settings, rates = plans.settings, plans.rates
    if settings.strategy == "fsdp2":
        yield (
            "N GPUs are --trainer.devices=N --trainer.strategy.init_args.data_parallel_size=N, and one is "
            "--trainer.devices=1 --trainer.strategy=auto."
        )
    scored = f", {SCORED:.0%} of the rollouts scored by {settings.credit.name}" if settings.credit.runs else ""
    yield (
        f"Seconds assume responses of {settings.response_tokens:.0f} tokens (--response_tokens), no dead "
        f"groups{scored}; {_figure(rates.tflops)} TFLOP/s in half precision and {_figure(rates.tflops_full)} in "
        f"float32, {_figure(rates.memory)} GB/s of memory, {_figure(rates.link)} GB/s between ranks, "
        f"{_figure(rates.block_ms)} ms for a block of a decoding step (--rates)."
    )
    adapters = plans.shapes.trainable_bytes if settings.loading.lora is not None else 0
    exported = plans.shapes.weight_bytes - adapters
    yield (
        f"Memory is that of the longest rows. {plans.reserve:.0%} of a device are left free for its context, for "
        "libraries and for fragmentation (--reserve). By default a run keeps the best checkpoint and the last, a "
        f"third while one is replaced, and in the end an export of {in_units(exported)}."
    )


def as_values(plans: Plans) -> dict[str, Any]:
    """Plain values: bytes and seconds."""
    return {
        "policy": plans.settings.policy,
        "config": plans.source,
        "shapes": asdict(plans.shapes),
        "rates": asdict(plans.rates),
        "device_bytes": plans.memory,
        "reserve": plans.reserve,
        "plans": [_values(plans, plan) for plan in plans.plans],
    }


def _values(plans: Plans, plan: Capacity) -> dict[str, Any]:
    advice = plans.advice.get(plan.ranks)
    return {
        "devices": plan.ranks,
        "strategy": plan.strategy,
        "phases": {name: {"total": phase.total, "parts": phase.parts} for name, phase in plan.phases.items()},
        "peak": plan.peak.name,
        "fits": plans.fits(plan),
        "checkpoint_bytes": plan.checkpoint,
        "seconds": {name: None if math.isnan(value) else value for name, value in plan.seconds.items()},
        "largest_micro_batch": asdict(plan.micro),
        "sampling_calls": plan.calls,
        "advice": advice and {"options": [str(change) for change in advice.changes], "fits": advice.fits},
    }


def _device(plans: Plans) -> str:
    return "GPU" if plans.settings.device == "cuda" else "process"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<36}" + "".join(f"{cell:>10}" for cell in cells)


def _throughout(plan: Capacity) -> dict[str, int]:
    """The parts that are in every phase."""
    first, *others = [phase.parts for phase in plan.phases.values()]
    return {part: size for part, size in first.items() if all(part in parts for parts in others)}


def _size(size: int | None, unit: str) -> str:
    if size is None:
        return ""
    return f"{size / GIB:.2f}" if unit == "GiB" else f"{size / 2**20:.1f}"


def _seconds(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _count(number: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
