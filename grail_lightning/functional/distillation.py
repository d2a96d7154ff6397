"""The divergence of a policy from a teacher, over the whole vocabulary.

Shapes: ``N`` tokens, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grail_lightning.functional.tokens import DEFAULT_CHUNK_TOKENS, full_precision


def teacher_divergence(
    hidden: Tensor,
    teacher_hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> Tensor:
    r"""The KL of the student's distribution to that of a teacher with the same head, in chunks over tokens.

    .. math:: \mathrm{KL}_t = \sum_v \pi_v (\log\pi_v - \log q_v), \qquad
              \pi = \mathrm{softmax}(\mathrm{head}(h) / \tau), \qquad
              q = \mathrm{sg}\,\mathrm{softmax}(\mathrm{head}(h') / \tau)

    Forward and backward pass store the logits of `chunk_tokens` positions at one time, since the backward pass makes
    them again.

    Args:
        hidden: ``[N, D]`` states of the student that predict the tokens.
        teacher_hidden: ``[N, D]`` states of the teacher, which get no gradient.
        head: A function from states ``[n, D]`` to logits ``[n, V]``. Its weights get the student's gradient alone.
        temperature: The number by which both logits are divided.
        chunk_tokens: Positions whose logits exist at one time.

    Returns:
        ``[N]`` in nats, float32 at least.

    Source: SDPG, arXiv 2606.04036.
    """

    def chunk(states: Tensor, others: Tensor) -> Tensor:
        own = torch.log_softmax(full_precision(head(states)) / temperature, -1)
        with torch.no_grad():
            other = torch.log_softmax(full_precision(head(others)) / temperature, -1)
        return (own.exp() * (own - other)).sum(-1)

    graph = torch.is_grad_enabled()
    parts = zip(torch.split(hidden, chunk_tokens), torch.split(teacher_hidden.detach(), chunk_tokens), strict=True)
    found = [checkpoint(chunk, *part, use_reentrant=False) if graph else chunk(*part) for part in parts]
    return torch.cat(found)
