"""Seconds of each phase of a training step, from rates of the hardware. Pure, except for `measured`.

A phase takes as long as its arithmetic, or as reading its memory if that takes longer, plus the time in which kernels
are started one after the other, plus the exchange between ranks. Nothing overlaps, and grading is left out: its
processes run beside the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from grail_lightning.plan.memory import Placement
from grail_lightning.plan.shapes import Shapes


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device achieves, not what its maker states.

    Attributes:
        tflops: Matrix products in half precision, in 10¹² operations a second.
        tflops_full: The same in float32.
        memory: Reading of memory, in 10⁹ bytes a second.
        link: Exchange between ranks, in 10⁹ bytes a second in and out of each.
        block_ms: Milliseconds that a block takes in a forward pass of a few tokens, however small it is.
    """

    tflops: float
    tflops_full: float
    memory: float
    link: float
    block_ms: float

    def __post_init__(self) -> None:
        for option in fields(self):
            if not (value := getattr(self, option.name)) > 0 and option.name != "block_ms":
                raise ValueError(f"`--rates` {option.name} must be positive, but got {value:g}.")


# 40 % of the stated products in bfloat16 (70 % in float32), 70 % of the stated memory bandwidth, a quarter of NVLink's
# stated sum of both directions. `block_ms` is an assumption about Transformers' loop, which starts each kernel itself.
PRESETS = {
    "a100": Rates(tflops=125, tflops_full=14, memory=1400, link=150, block_ms=0.6),
    "h100": Rates(tflops=400, tflops_full=47, memory=2350, link=225, block_ms=0.5),
    "h200": Rates(tflops=400, tflops_full=47, memory=3350, link=225, block_ms=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step of one rank does.

    Attributes:
        rows: Rows of a batch on this rank.
        prompts: Prompts of a batch on this rank.
        prompt: Tokens of a prompt.
        response: Tokens of a mean response.
        longest: The limit of a response.
        calls: Calls of the engine one after the other.
        passes: Passes over the rollouts.
        micro_batches: Micro-batches of a pass.
        cached_token: Bytes of the keys and values of a token.
        checkpointed: Whether blocks are run again in the backward pass.
        half: Whether products are in half precision.
        shared: Whether a prompt is run once for all of its rows.
        forwards: Forward passes for credit.
        backwards: Backward passes for credit.
        scored: The share of rows that are scored for credit.
    """

    rows: int
    prompts: int
    prompt: int
    response: float
    longest: int
    calls: int
    passes: int
    micro_batches: int
    cached_token: int
    checkpointed: bool
    half: bool
    shared: bool
    forwards: float = 0.0
    backwards: float = 0.0
    scored: float = 1.0


def forward_flops(shapes: Shapes, work: Work, rows: float) -> tuple[float, float]:
    """Operations of a forward pass of some rows: in the blocks, and in the head.

    A product of a weight with a token takes two operations a parameter; attention takes four for each pair of a query
    and a key that it may see, and for each column of its heads.
    """
    prompts = work.prompts * rows / work.rows if work.shared else rows
    tokens = prompts * work.prompt + rows * work.response
    head = shapes.vocabulary * shapes.hidden
    products = 2 * (shapes.linear - head) * tokens
    pairs = rows * work.response * (work.prompt + work.response / 2) + prompts * work.prompt**2 / 2
    return products + 4 * shapes.blocks * shapes.heads * pairs, 2 * head * rows * work.response


def sampling_seconds(shapes: Shapes, placement: Placement, work: Work, rates: Rates) -> float:
    """Every step of a call reads all weights; each token reads the keys and values before it."""
    weights = 2 * shapes.linear if placement.autocast else shapes.weight_bytes
    before = work.prompt + work.response / 2
    read = work.calls * work.longest * weights + work.rows * work.response * before * work.cached_token
    blocks, head = forward_flops(shapes, work, work.rows)
    started = work.calls * work.longest * shapes.blocks * rates.block_ms / 1e3
    gathered = shapes.weight_bytes * _others(placement) / (rates.link * 1e9) if placement.sharded else 0.0
    return max(read / (rates.memory * 1e9), (blocks + head) / _flops(work, rates)) + started + gathered


def update_seconds(shapes: Shapes, placement: Placement, work: Work, rates: Rates) -> float:
    """All passes over the rollouts: a forward pass, a backward pass twice as long, and what is run again."""
    blocks, head = forward_flops(shapes, work, work.rows)
    trained = shapes.trainable == shapes.parameters  # Frozen weights need no gradient of their own.
    run = blocks * (2 + trained + work.checkpointed) + head * (3 + shapes.head_trained)
    started = work.micro_batches * shapes.blocks * (3 + work.checkpointed) * rates.block_ms / 1e3
    # The optimiser reads and writes weights, gradients and its state.
    stepped = 8 * placement.share(shapes.trainable_bytes) / (rates.memory * 1e9)
    return work.passes * (run / _flops(work, rates) + started + stepped + _exchange(shapes, placement, work, rates))


def credit_seconds(shapes: Shapes, placement: Placement, work: Work, rates: Rates) -> float:
    """The passes of the credit method, whose weights get no gradient.

    Sharded weights are gathered once for passes of its own, and for each micro-batch of an update's forward pass.
    """
    blocks, _ = forward_flops(shapes, work, work.rows * work.scored)
    again = work.checkpointed if work.backwards else 0
    run = blocks * (work.forwards + work.backwards * (1 + again))
    times = 1 if work.forwards else work.micro_batches * work.scored
    exchanged = times * shapes.weight_bytes * _others(placement) if placement.sharded and run else 0.0
    return run / _flops(work, rates) + exchanged / (rates.link * 1e9)


def _exchange(shapes: Shapes, placement: Placement, work: Work, rates: Rates) -> float:
    """Gradients of replicated weights are reduced once a step; sharded weights are gathered twice a micro-batch."""
    link = rates.link * 1e9
    if placement.sharded:
        reduced = shapes.trainable_bytes * (1 if placement.reduce_once else work.micro_batches)
        return (2 * work.micro_batches * shapes.weight_bytes + reduced) * _others(placement) / link
    return 2 * shapes.trainable_bytes * _others(placement) / link


def _others(placement: Placement) -> float:
    """The share of what is exchanged that comes from other ranks."""
    return (placement.ranks - 1) / placement.ranks


def _flops(work: Work, rates: Rates) -> float:
    return (rates.tflops if work.half else rates.tflops_full) * 1e12


def read_rates(given: list[str], device: str) -> Rates:
    """The rates of ``--rates``: a preset or ``measured``, and single values such as ``tflops=300``.

    Raises:
        ValueError: For an unknown name or a value that is no number.
    """
    names = {option.name for option in fields(Rates)}
    rates: Rates | None = None
    changes: dict[str, float] = {}
    for part in given:
        name, equals, value = part.partition("=")
        if not equals and name in (*PRESETS, "measured"):
            rates = measured() if name == "measured" else PRESETS[name]
            continue
        try:
            changes[name if name in names else ""] = float(value)
        except ValueError:
            changes[""] = 0.0
        if "" in changes:
            raise ValueError(
                f"`--rates` must be {', '.join(PRESETS)}, measured, or values such as tflops=300 (of "
                f"{', '.join(sorted(names))}), but got {part!r}."
            )
    base = rates or (measured() if device == "cpu" else PRESETS["h100"])
    return replace(base, **changes)


def measured() -> Rates:
    """The rates of this machine: of its GPU, or else of one process on its CPU. It takes a few seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else 1024
    half, full = (_product_rate(size, dtype, device) for dtype in (torch.bfloat16, torch.float32))
    buffer = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    copied = 2 * buffer.nbytes / _fastest(lambda: buffer.clone(), device)
    small = torch.ones(8, 64, device=device)
    # A block of Transformers starts about forty operations.
    started = 40 * _fastest(lambda: small.add(1), device)
    return Rates(tflops=half, tflops_full=full, memory=copied / 1e9, link=copied / 4e9, block_ms=1e3 * started)


def _product_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _fastest(lambda: matrix @ matrix, device) / 1e12


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls."""
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found)
