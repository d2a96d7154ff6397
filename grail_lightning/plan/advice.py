"""Options that make a run fit, found by planning it again with each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

from grail_lightning.plan.capacity import Capacity, Planner
from grail_lightning.plan.settings import Settings, ranks_rows
from grail_lightning.policy import LoRA

MOST_TURNS = 16
LEAST_CHUNK_TOKENS = 128


@dataclass(frozen=True)
class Change:
    """An option with another value.

    Attributes:
        option: The arguments of the command line without the value, which follows them.
        value: The value.
        apply: A function from settings to the same settings with that option.
    """

    option: str
    value: str
    apply: Callable[[Settings], Settings]

    def __str__(self) -> str:
        return f"{self.option}={self.value}"


@dataclass(frozen=True)
class Advice:
    """Options that together make a run need less memory.

    Attributes:
        changes: The options.
        capacity: The plan with them.
        fits: Whether that fits.
    """

    changes: list[Change]
    capacity: Capacity
    fits: bool


def advise(planner: Planner, settings: Settings, ranks: int, limit: float) -> Advice:
    """Options with which a run needs at most `limit` bytes of a device, as far as there are any.

    At each turn the first option that suffices is taken, or else the one that saves most. Options that change what is
    trained come after all others. Those that have turned out to be needless are left out again.
    """

    def planned(changes: list[Change]) -> Capacity:
        return planner.plan(reduce(lambda made, change: change.apply(made), changes, settings), ranks)

    taken: dict[str, Change] = {}
    for _ in range(MOST_TURNS):
        present = reduce(lambda made, change: change.apply(made), taken.values(), settings)
        found = planner.plan(present, ranks)
        if found.peak.total <= limit:
            break
        best = _best(planner, present, found, ranks, limit)
        if best is None:
            break
        taken[best.option] = best
    for change in list(taken.values()):
        others = [other for other in taken.values() if other is not change]
        if planned(others).peak.total <= limit:
            del taken[change.option]
    found = planned(list(taken.values()))
    return Advice(list(taken.values()), found, found.peak.total <= limit)


def _best(planner: Planner, settings: Settings, found: Capacity, ranks: int, limit: float) -> Change | None:
    """The next option to take; None if none saves anything."""
    for group in (_same_training(settings, ranks), _other_training(settings)):
        tried = [(change, planner.plan(change.apply(settings), ranks).peak.total) for change in group]
        tried = [(change, peak) for change, peak in tried if peak < found.peak.total]
        if tried:
            enough = [change for change, peak in tried if peak <= limit]
            return enough[0] if enough else min(tried, key=lambda pair: pair[1])[0]
    return None


def _same_training(settings: Settings, ranks: int) -> Iterator[Change]:
    """Options that cost time, and leave what is trained as it is."""
    loading, used = settings.loading, settings.width * ranks_rows(settings, ranks)[1]
    cached, budget = (_below(limit, used) for limit in (settings.cache_tokens or 0, settings.execution.token_budget))
    if cached >= settings.width:
        engine = "--model.engine=HFEngine --model.engine.cache_tokens"
        yield Change(engine, str(cached), lambda old: replace(old, cache_tokens=cached))
    if budget >= settings.width:
        yield Change(
            "--model.execution.token_budget",
            str(budget),
            lambda old: replace(old, execution=replace(old.execution, token_budget=budget)),
        )
    if not loading.gradient_checkpointing:
        yield _loading("gradient_checkpointing", "true", True)
    if ranks > 1 and settings.strategy != "fsdp2":
        yield Change("--trainer.strategy", "ModelParallelStrategy", lambda old: replace(old, strategy="fsdp2"))
    if loading.reduce_once and settings.strategy == "fsdp2":
        yield _loading("reduce_once", "false", False)
    if (chunk := loading.chunk_tokens // 2) >= LEAST_CHUNK_TOKENS:
        yield _loading("chunk_tokens", str(chunk), chunk)
    if settings.device == "cuda" and settings.precision == "32-true" and loading.dtype == "float32":
        yield Change("--trainer.precision", "bf16-mixed", lambda old: replace(old, precision="bf16-mixed"))


def _other_training(settings: Settings) -> Iterator[Change]:
    """Options that change what is trained, or how exactly."""
    if settings.loading.lora is not None:
        return
    name = "torchao.optim.AdamW8bit"
    if settings.optimizer_name.rpartition(".")[2] in ("Adam", "AdamW"):
        yield Change("--model.optimizer", name, lambda old: replace(old, optimizer_name=name))
    lora = LoRA()
    yield Change(
        "--model.loading.lora.rank",
        str(lora.rank),
        lambda old: replace(old, loading=replace(old.loading, lora=lora)),
    )


def _below(limit: int, used: int) -> int:
    """Half of a limit, or so little of it that it limits what is used."""
    limit //= 2
    while limit >= used:
        limit //= 2
    return limit


def _loading(name: str, text: str, value: int) -> Change:
    def apply(old: Settings) -> Settings:
        changed: dict[str, int] = {name: value}
        return replace(old, loading=replace(old.loading, **changed))  # type: ignore[arg-type]

    return Change(f"--model.loading.{name}", text, apply)
