"""Memory of each phase of a training step on one rank. Pure.

A phase has parts, in bytes, which exist at the same time. What a run keeps from step to step is in every phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from grail_lightning.plan.head import Head, kept_gradient
from grail_lightning.plan.settings import Strategy
from grail_lightning.plan.shapes import Shapes
from grail_lightning.plan.trace import Activations, DecodingBytes

ROLLOUT_BYTES = 48  # Ids, masks, log-probabilities, weights and advantages of a token of the batch.


@dataclass(frozen=True)
class Phase:
    """The memory of a phase.

    Attributes:
        name: The name of the phase.
        parts: Bytes by the name of what they are.
    """

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The bytes of the phase."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How weights and gradients are placed on ranks.

    Attributes:
        strategy: The strategy.
        ranks: The number of ranks.
        masters: Whether weights in half precision have float32 masters.
        autocast: Whether linear layers cast their weights to half precision.
        reduce_once: Whether whole gradients stay on every rank until the last micro-batch.
    """

    strategy: Strategy
    ranks: int = 1
    masters: bool = False
    autocast: bool = False
    reduce_once: bool = False

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded."""
        return self.strategy == "fsdp2" and self.ranks > 1

    def share(self, size: int) -> int:
        """The bytes of one rank, of something that is sharded with the weights."""
        return -(-size // self.ranks) if self.sharded else size


def kept(
    shapes: Shapes, placement: Placement, state: int, *, reference: bool, rollout_tokens: int, second: bool = False
) -> dict[str, int]:
    """What exists throughout a run.

    Args:
        shapes: The numbers of parameters.
        placement: How they are placed.
        state: Bytes of the optimiser's state of all ranks together, or of one rank if weights are not sharded.
        reference: Whether there is a second, frozen copy of the policy.
        rollout_tokens: The tokens of a rank's batch, padding included.
        second: Whether a second model is trained; its optimiser is taken to be the policy's. Its gradients are freed
            before the policy has any.
    """
    weights = placement.share(shapes.weight_bytes)
    buckets = shapes.trainable_bytes if placement.strategy == "ddp" and placement.ranks > 1 else 0
    masters = 4 * shapes.half if placement.masters and not placement.sharded else 0
    parts = {
        "weights": weights,
        "master weights": masters,
        "optimizer state": placement.share(state),
        "DDP's buckets": buckets,
        "reference": weights if reference else 0,
        "second model": weights + masters + placement.share(state) if second else 0,
        "rollouts": rollout_tokens * ROLLOUT_BYTES,
    }
    return {name: size for name, size in parts.items() if size}


def checkpoint_bytes(shapes: Shapes, placement: Placement, state: int, *, second: bool = False) -> int:
    """Bytes of a checkpoint on disk: weights, those in half precision as their masters, and the optimiser's state.

    Args:
        shapes: The numbers of parameters.
        placement: How they are placed.
        state: Bytes of the optimiser's state of all ranks together.
        second: Whether a second model is trained, of which a checkpoint has what its optimiser updates.
    """
    masters = 2 * shapes.half if placement.masters else 0  # In place of the weights that are rounded from them.
    of_second = shapes.trainable_bytes + masters + state if second else 0
    return shapes.weight_bytes + masters + state + of_second


def sampling(
    always: dict[str, int], shapes: Shapes, placement: Placement, decoding: DecodingBytes, rows: int, width: int
) -> Phase:
    """The memory of a call of the engine, when its cache is full.

    Args:
        always: What exists throughout a run.
        shapes: The numbers of parameters.
        placement: How they are placed.
        decoding: What decoding allocates.
        rows: Rows of the call.
        width: The most tokens of a row.
    """
    cache = rows * width * decoding.cached_token
    parts = {
        "gathered weights": shapes.weight_bytes if placement.sharded else 0,
        "cast weights": 2 * shapes.linear if placement.autocast else 0,
        # A layer's tensors are copied as they grow.
        "KV cache": cache + cache // shapes.blocks,
        "decoding": max(decoding.prompts, decoding.step),
    }
    return Phase("sampling", always | {name: size for name, size in parts.items() if size})


def credit(always: dict[str, int], shapes: Shapes, placement: Placement, activations: int) -> Phase:
    """The memory of a pass that computes token weights, in which parameters have no gradient."""
    gathered = {"gathered weights": shapes.weight_bytes} if placement.sharded else {}
    return Phase("credit", always | gathered | {"activations": activations})


def update(
    always: dict[str, int],
    shapes: Shapes,
    placement: Placement,
    activations: Activations,
    head: Head,
    *,
    tokens: int,
    logits: int,
    sparse_embeddings: bool,
) -> Phase:
    """The memory of the backward pass of a micro-batch that is not the first.

    It is the largest of three moments: at the head, in the blocks, and at the embeddings.

    Args:
        always: What exists throughout a run.
        shapes: The numbers of parameters.
        placement: How they are placed.
        activations: The tensors of the blocks.
        head: The sizes of the head.
        tokens: Places for tokens in the decoder's input.
        logits: The most bytes of the head; see `head_bytes`.
        sparse_embeddings: Whether the embeddings' gradient contains the rows alone that were read.
    """
    waiting = kept_gradient(head)
    inputs = tokens * head.hidden * head.weight
    embeddings = 2 * inputs if sparse_embeddings or not head.trained else inputs + head.size * head.weight
    moments = {
        "logits": (activations.held, logits),
        "head's gradient": (activations.peak, waiting),
        "embeddings' gradient": (inputs, waiting + embeddings),
    }
    name, (blocks, rest) = max(moments.items(), key=lambda moment: sum(moment[1]))
    parts = gradients(shapes, placement) | {"activations": blocks, name: rest}
    return Phase("update", always | {name: size for name, size in parts.items() if size})


def gradients(shapes: Shapes, placement: Placement) -> dict[str, int]:
    """The gradients that a rank accumulates, and with sharded weights what it gathers and reduces meanwhile."""
    full = shapes.trainable_bytes
    if placement.masters and not placement.sharded:
        full += 2 * shapes.half  # They are accumulated in float32.
    if not placement.sharded:
        return {"gradients": full}
    # The blocks' share of trained weights stands for the root's, too.
    block = shapes.block_bytes
    root = shapes.weight_bytes - shapes.blocks * block
    trained = shapes.trainable_bytes / shapes.weight_bytes
    # Two blocks are whole while the next one is gathered into a buffer; one block's gradients are reduced from another.
    whole = root + 3 * block + round(trained * (root + 3 * block))
    return {"gradients": full if placement.reduce_once else placement.share(full), "whole blocks": whole}


def step(always: dict[str, int], shapes: Shapes, placement: Placement, workspace: int) -> Phase:
    """The memory of the optimiser's step, with the tensors that it allocates besides its state."""
    full = gradients(shapes, placement)["gradients"]
    parts = {
        "gradients": placement.share(shapes.trainable_bytes) if placement.sharded else full,
        "workspace": workspace,
    }
    return Phase("optimizer step", always | {name: size for name, size in parts.items() if size})
