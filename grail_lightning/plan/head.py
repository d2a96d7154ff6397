"""Memory of the log-probabilities behind the decoder: its head runs on a chunk of tokens at a time. Pure.

The steps are those of `grail_lightning.functional.tokens`. Shapes: ``M`` predictions, ``c`` tokens of a chunk, ``r``
rows of a chunk that one operation reads, ``V`` vocabulary, ``D`` width.
"""

from __future__ import annotations

from dataclasses import dataclass

from grail_lightning.functional.tokens import CACHED

FLOAT = 4
LOGITS_ON_CPU, LOGITS_ON_GPU = 2**25, 2**28


@dataclass(frozen=True, kw_only=True)
class Head:
    """The sizes of a head.

    Attributes:
        vocabulary: V.
        hidden: D.
        weight: Bytes of an element of its weight.
        compute: Bytes of an element of the logits that it returns.
        state: Bytes of an element of the decoder's output.
        trained: Whether its weight is trained.
        tied: Whether its weight is that of the embeddings, too.
        in_place: Whether its gradient is added to `weight.grad` itself.
        scaled: Whether logits are divided by a temperature other than 1.
    """

    vocabulary: int
    hidden: int
    weight: int
    compute: int
    state: int
    trained: bool = True
    tied: bool = False
    in_place: bool = False
    scaled: bool = False

    @property
    def by_hand(self) -> bool:
        """Whether the product with the weight is differentiated by hand; with copies of the weight autograd does it."""
        return self.weight == self.compute == self.state

    @property
    def size(self) -> int:
        """``V · D``."""
        return self.vocabulary * self.hidden


def chunk_tokens(requested: int, vocabulary: int, *, cpu: bool) -> int:
    """``c``: see `Policy.chunk_tokens`."""
    return max(1, min(requested, (LOGITS_ON_CPU if cpu else LOGITS_ON_GPU) // vocabulary))


def block_rows(chunk: int, vocabulary: int, *, cpu: bool) -> int:
    """``r``: all of a chunk on a GPU, as many as its cache holds on a CPU."""
    return min(chunk, max(1, CACHED // vocabulary)) if cpu else chunk


def head_bytes(head: Head, predictions: int, chunk: int, rows: int) -> int:
    """The most bytes of the head in the forward or the backward pass of a micro-batch, beside the decoder's output.

    Args:
        head: The sizes of the head.
        predictions: ``M``.
        chunk: The most tokens of a chunk.
        rows: The most rows that one operation reads.
    """
    chunk = min(chunk, predictions)
    states = predictions * head.hidden * head.state
    if predictions <= chunk and not head.by_hand:
        return states + _whole(head, chunk)
    rows = min(rows, chunk)
    # The logits of a single chunk are kept for the backward pass, which copies those of the tokens with a gradient.
    kept = chunk * head.vocabulary * head.compute if predictions <= chunk else 0
    return states + max(_forward(head, chunk, rows), states + kept + _backward(head, chunk, rows))


def scoring_bytes(head: Head, predictions: int, chunk: int) -> int:
    """The most bytes of the head in a forward pass without gradient, with entropy, beside the decoder's output."""
    chunk = min(chunk, predictions)
    logits = chunk * head.vocabulary
    # The scaled logits, their softmax, and the product of both.
    return predictions * head.hidden * head.state + _casts(head, chunk) + logits * (head.compute + 3 * FLOAT)


def kept_gradient(head: Head) -> int:
    """Bytes of the head's gradient that wait, while the blocks are differentiated, for that of the embeddings."""
    return head.size * head.weight if head.trained and head.tied and not head.in_place else 0


def _forward(head: Head, chunk: int, rows: int) -> int:
    logits = chunk * head.vocabulary * head.compute
    copied = head.compute < FLOAT or head.scaled
    return logits + (1 + copied) * rows * head.vocabulary * FLOAT + _casts(head, chunk)


def _casts(head: Head, chunk: int) -> int:
    """Copies of the weight and of the states in the dtype of the product."""
    if head.by_hand:
        return 0
    weight = head.size * head.compute if head.weight != head.compute else 0
    return weight + (chunk * head.hidden * head.compute if head.state != head.compute else 0)


def _backward(head: Head, chunk: int, rows: int) -> int:
    logits, block = chunk * head.vocabulary * head.compute, rows * head.vocabulary * FLOAT
    copied = head.compute < FLOAT or head.scaled
    states = chunk * head.hidden * head.state
    total = head.size * head.weight if head.trained and not head.in_place else 0
    if head.by_hand:
        return total + states + logits + max((1 + copied) * block, states)
    whole = chunk * head.vocabulary * FLOAT
    slope = logits + (1 + copied) * whole
    # The gradient of the weight, in the dtype of the product and then in its own.
    gradient = head.size * (head.compute + (head.weight if head.weight != head.compute else 0)) if head.trained else 0
    return total + states + _casts(head, chunk) + max(slope, 2 * logits + states + gradient)


def _whole(head: Head, chunk: int) -> int:
    """One chunk through autograd: logits, scaled logits, and a few tensors of that size in the backward pass."""
    logits = chunk * head.vocabulary
    gradient = head.size * (head.compute + head.weight) if head.trained else 0
    return _casts(head, chunk) + logits * (head.compute + 4 * FLOAT) + gradient
