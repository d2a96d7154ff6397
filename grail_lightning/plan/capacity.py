"""A run on a number of devices: the memory of each phase, and its seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from grail_lightning.plan import memory, seconds
from grail_lightning.plan.head import Head, block_rows, chunk_tokens, head_bytes, scoring_bytes
from grail_lightning.plan.memory import Phase, Placement
from grail_lightning.plan.rows import MicroShape, largest_micro_batch
from grail_lightning.plan.seconds import Rates, Work
from grail_lightning.plan.settings import Settings, ranks_rows
from grail_lightning.plan.shapes import Shapes, build, count, optimizer_bytes
from grail_lightning.plan.trace import Activations, DecodingBytes, Gradient, trace_blocks, trace_decoding
from grail_lightning.policy.trees import TreeKernel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")

SCORED = 0.5  # The share of rollouts that are wrong and boxed, or otherwise inside a method's gate: an assumption.


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a run needs of each device.

    Attributes:
        ranks: The number of devices.
        strategy: The strategy with this number.
        phases: The memory of each phase, by its name.
        seconds: Seconds of each phase.
        micro: The largest micro-batch of the update.
        calls: Calls of the engine for a batch.
        checkpoint: Bytes of a checkpoint on disk.
    """

    ranks: int
    strategy: str
    phases: dict[str, Phase]
    seconds: dict[str, float]
    micro: MicroShape
    calls: int
    checkpoint: int

    @property
    def peak(self) -> Phase:
        """The phase with most memory."""
        return max(self.phases.values(), key=lambda phase: phase.total)


class Planner:
    """Plans runs of one model. What has been traced is kept, since most plans of a table have it in common.

    Args:
        config: The model's config.
        rates: The rates of a device.
    """

    def __init__(self, config: PreTrainedConfig, rates: Rates) -> None:
        self.config, self.rates = config, rates
        self._found: dict[tuple[object, ...], object] = {}

    def plan(self, settings: Settings, ranks: int) -> Capacity:
        """The memory and the seconds of a run on `ranks` devices.

        Raises:
            ValueError: If the run cannot be planned.
        """
        settings = replace(settings, strategy=settings.strategy if ranks > 1 else "single")
        shapes, (state, workspace) = self.shapes(settings), self.optimizer(settings)
        placement = placement_of(settings, shapes, ranks)
        always = memory.kept(
            shapes,
            placement,
            state,
            reference=settings.compares and settings.loading.lora is None,
            rollout_tokens=ranks_rows(settings, ranks)[1] * settings.width,
            second=settings.credit.trains,
        )
        phases: list[Phase] = []
        calls, cached = 1, 0
        if settings.cache_tokens is not None:
            rows, calls, decoding = self._decoding(settings, shapes, ranks, settings.cache_tokens)
            cached = decoding.cached_token
            phases.append(memory.sampling(always, shapes, placement, decoding, rows, settings.width))
        if own_pass(settings):
            phases.append(memory.credit(always, shapes, placement, self._credit(settings, shapes, placement)))
        micro = _micro(settings, ranks, trees=tree_kernel(settings, shapes, self.config))
        phases.append(self._update(settings, shapes, placement, always, micro))
        phases.append(memory.step(always, shapes, placement, placement.share(workspace)))
        work = _work(settings, ranks, micro, calls, cached)
        return Capacity(
            ranks=ranks,
            strategy=settings.strategy,
            phases={phase.name: phase for phase in phases},
            seconds=self._seconds(settings, shapes, placement, work),
            micro=micro,
            calls=calls,
            checkpoint=memory.checkpoint_bytes(shapes, placement, state, second=settings.credit.trains),
        )

    def shapes(self, settings: Settings) -> Shapes:
        """The numbers of parameters."""
        return self._once(("shapes", *_key(settings)), lambda: count(build(self.config, settings)))

    def optimizer(self, settings: Settings) -> tuple[int, int]:
        """Bytes of the optimiser's state, and of a step of it."""
        key = ("optimizer", settings.optimizer_name, settings.strategy, *_key(settings))
        return self._once(key, lambda: optimizer_bytes(build(self.config, settings), settings))

    def blocks(self, settings: Settings, micro: MicroShape, gradient: Gradient) -> Activations:
        """What the decoder blocks allocate."""
        number = self.shapes(settings).blocks
        key = ("blocks", micro, gradient, *_key(settings))
        return self._once(key, lambda: trace_blocks(self.config, settings, micro, number, gradient))

    def _decoding(
        self, settings: Settings, shapes: Shapes, ranks: int, cache_tokens: int
    ) -> tuple[int, int, DecodingBytes]:
        """Rows of a call, the number of calls, and what decoding allocates."""
        prompts, rows = ranks_rows(settings, ranks)
        in_call = min(rows, max(cache_tokens // settings.width, 1))
        asked = min(prompts, math.ceil(in_call / settings.execution.group_size))
        sizes = {"prompts": asked, "rows": in_call, "width": settings.width}
        key = ("decoding", *sizes.values(), settings.sampling, *_key(settings))
        found = self._once(key, lambda: trace_decoding(self.config, settings, shapes.blocks, **sizes))
        return in_call, math.ceil(rows / in_call), found

    def _credit(self, settings: Settings, shapes: Shapes, placement: Placement) -> int:
        """The activations of a credit method's own pass."""
        credit, trees = settings.credit, tree_kernel(settings, shapes, self.config)
        gaussian = credit.name == "OARGradient"
        trees = None if gaussian else trees
        micro = _micro(settings, placement.ranks, trees=trees, share=not credit.backwards)
        found = self.blocks(settings, micro, "embeddings" if credit.backwards else "none")
        if not credit.backwards:
            head = head_of(settings, shapes, placement, found.state)
            chunk = chunk_tokens(settings.loading.chunk_tokens, head.vocabulary, cpu=settings.device == "cpu")
            return max(found.peak, found.held + scoring_bytes(head, micro.predictions, chunk))
        # The clean embeddings, the noise, and distributions of the answer for each row.
        return found.peak + (8 * micro.tokens * shapes.hidden + 12 * micro.rows * shapes.vocabulary) * gaussian

    def _update(
        self, settings: Settings, shapes: Shapes, placement: Placement, always: dict[str, int], micro: MicroShape
    ) -> Phase:
        activations = self.blocks(settings, micro, "weights")
        head = head_of(settings, shapes, placement, activations.state)
        return memory.update(
            always,
            shapes,
            placement,
            activations,
            head,
            tokens=micro.tokens,
            logits=_logits(settings, head, micro),
            sparse_embeddings=settings.device == "cpu" and placement.ranks == 1 and head.weight == 4,
        )

    def _seconds(self, settings: Settings, shapes: Shapes, placement: Placement, work: Work) -> dict[str, float]:
        """Seconds of each phase; NaN where another engine or a class of the user's does the work."""
        given = shapes, placement, work, self.rates
        return {
            "sampling": seconds.sampling_seconds(*given) if work.cached_token else math.nan,
            "credit": seconds.credit_seconds(*given) if settings.credit.known else math.nan,
            "update": seconds.update_seconds(*given),
        }

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What `make` returns, made once for each key.

        Raises:
            ValueError: If the architecture needs tensors with data.
        """
        if key not in self._found:
            try:
                self._found[key] = make()
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"`model.policy` must be a decoder of attention and dense layers to be planned, but "
                    f"{self.config.model_type} is not ({str(error).splitlines()[0].rstrip('.')})."
                ) from error
        return cast(T, self._found[key])


def placement_of(settings: Settings, shapes: Shapes, ranks: int) -> Placement:
    """How weights are placed on a number of ranks."""
    sharded = settings.strategy == "fsdp2" and ranks > 1
    return Placement(
        strategy=settings.strategy,
        ranks=ranks,
        masters=bool(shapes.half) and settings.loading.master_weights and not sharded,
        autocast=settings.autocast,
        reduce_once=settings.loading.reduce_once,
    )


def head_of(settings: Settings, shapes: Shapes, placement: Placement, state: int) -> Head:
    """The sizes of the head; `state` is the bytes of an element of the decoder's output."""
    return Head(
        vocabulary=shapes.vocabulary,
        hidden=shapes.hidden,
        weight=shapes.head_element,
        compute=2 if settings.autocast else shapes.head_element,
        state=state,
        trained=shapes.head_trained,
        tied=shapes.tied,
        in_place=placement.ranks == 1 and not placement.masters and not settings.autocast,
        scaled=settings.sampling.logprob_temperature != 1,
    )


def _logits(settings: Settings, head: Head, micro: MicroShape) -> int:
    """The most bytes of the head."""
    cpu = settings.device == "cpu"
    chunk = chunk_tokens(settings.loading.chunk_tokens, head.vocabulary, cpu=cpu)
    return head_bytes(head, micro.predictions, chunk, block_rows(chunk, head.vocabulary, cpu=cpu))


def tree_kernel(settings: Settings, shapes: Shapes, config: PreTrainedConfig) -> TreeKernel | None:
    """What computes attention if the update runs prefix trees; None if it runs separate rows."""
    text, loading = config.get_text_config(), settings.loading
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    apart = not settings.execution.share_prefixes or loading.packing or (loading.lora and loading.lora.dropout)
    if apart or not shapes.sdpa or loading.attention == "flash_attention_2":
        return None
    if any(window is not None and settings.width > window for window in windows):
        return None
    return "flex" if settings.device == "cuda" and loading.tree_attention != "sdpa" else "sdpa"


def own_pass(settings: Settings) -> bool:
    """Whether credit needs passes of its own; see `grail_lightning.step.assign.assign_credit`."""
    credit, lora = settings.credit, settings.loading.lora
    separate = (
        settings.controlled
        or settings.objective.entropy_coefficient
        or settings.objective.distillation
        or (lora and lora.dropout)
    )
    return credit.runs and (not credit.fused or bool(separate))


def _micro(settings: Settings, ranks: int, *, trees: TreeKernel | None, share: bool = True) -> MicroShape:
    execution = settings.execution
    prompts, _ = ranks_rows(settings, ranks)
    lengths = settings.prompt_tokens, settings.sampling.max_response_length
    sizes = prompts, execution.group_size, *lengths, execution.token_budget
    return largest_micro_batch(*sizes, trees=trees, share=share)


def _work(settings: Settings, ranks: int, micro: MicroShape, calls: int, cached: int) -> Work:
    prompts, rows = ranks_rows(settings, ranks)
    credit, own = settings.credit, own_pass(settings)
    mean = settings.prompt_tokens + settings.response_tokens
    in_micro = max(1, int(settings.execution.token_budget // mean))
    return Work(
        rows=rows,
        prompts=prompts,
        prompt=settings.prompt_tokens,
        response=settings.response_tokens,
        longest=settings.sampling.max_response_length,
        calls=calls,
        passes=settings.execution.updates_per_batch,
        micro_batches=math.ceil(rows / in_micro),
        cached_token=cached,
        checkpointed=settings.loading.gradient_checkpointing,
        half=settings.autocast or settings.weight_dtype(torch.float32).itemsize == 2,
        shared=micro.trees is not None,
        forwards=credit.forwards if own else 0.0,  # A fused one has the update's.
        backwards=credit.backwards,
        scored=SCORED * (settings.execution.updates_per_batch if credit.refreshed else 1),
    )


def _key(settings: Settings) -> tuple[object, ...]:
    """What tensors without data depend on, beside their sizes."""
    loading = settings.loading
    loaded = loading.dtype, loading.attention, loading.tree_attention, loading.gradient_checkpointing, loading.lora
    masters = loading.master_weights and settings.strategy != "fsdp2"
    return *map(str, loaded), settings.precision, settings.device, masters
