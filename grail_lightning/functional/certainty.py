"""Figures of whole distributions (certainty, divergence from another policy), and comparisons within a batch.

Shapes: ``B`` rows, ``D`` width, ``V`` vocabulary, ``N`` tokens. Of each policy there are the states ``[N, D]`` that
predict the tokens (already shifted) and a head, a function from states ``[n, D]`` to logits ``[n, V]``, which exist for
`chunk_tokens` positions at one time. Both are divided by the temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grail_lightning.functional.tokens import DEFAULT_CHUNK_TOKENS, full_precision


def quantile_of_all(values: Tensor, q: float) -> Tensor:
    """The interpolated quantile of ``[N]`` values, float64, 0 without any. `torch.quantile` takes 16 million."""
    if not 0 <= q <= 1:
        raise ValueError(f"`q` must lie in [0, 1], but got {q}.")
    if not len(values):
        return values.new_zeros((), dtype=torch.float64)
    ordered = values.double().sort().values
    position = q * (len(values) - 1)
    low, high = ordered[int(position)], ordered[min(int(position) + 1, len(values) - 1)]
    return low + (high - low) * (position - int(position))


@torch.no_grad()
def self_certainty(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    r"""Self-certainty at each token, and the token's own logit, in chunks over tokens.

    .. math:: c = \log\sum_v e^{z_v} - \frac{1}{V} \sum_v z_v, \qquad z = \mathrm{head}(h) / \tau

    Up to a constant, ``c`` is the divergence of the policy from a uniform one; it carries no gradient. The token's own
    logit is not divided by the temperature. ``[N]`` each.

    Source: self-certainty, arXiv 2502.18581; as UCAS uses it, arXiv 2510.10649.
    """

    def figures(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        scaled = logits / temperature
        return scaled.logsumexp(-1) - scaled.mean(-1), _at(logits, ids)

    return _in_chunks(figures, hidden, head, token_ids, chunk_tokens)


@torch.no_grad()
def repeat_probability(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    r"""Each token's probability, and the probability that two draws at its position are equal, in chunks over tokens.

    .. math:: \pi(y), \qquad \sum_v \pi(v)^2, \qquad \pi = \mathrm{softmax}(\mathrm{head}(h) / \tau)

    ``[N]`` each.
    """

    def figures(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits / temperature, -1)
        return _at(probabilities, ids), probabilities.square().sum(-1)

    return _in_chunks(figures, hidden, head, token_ids, chunk_tokens)


@torch.no_grad()
def hellinger(
    hidden: Tensor,
    other_hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    other_head: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    r"""The squared Hellinger distance of two policies, and the entropy of the first one, in chunks over tokens.

    .. math:: d = 1 - \sum_v \sqrt{\pi(v)\, \pi'(v)}, \qquad H = -\sum_v \pi(v) \log \pi(v)

    ``[N]`` each, ``d`` in [0, 1] and ``H`` in nats.
    """

    def figures(logits: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.log_softmax(logits / temperature, -1)
        other = torch.log_softmax(full_precision(other_head(others)) / temperature, -1)
        return (1 - ((own + other) / 2).exp().sum(-1)).clamp(0, 1), -(own.exp() * own).sum(-1)

    return _in_chunks(figures, hidden, head, other_hidden, chunk_tokens)


def _at(table: Tensor, ids: Tensor) -> Tensor:
    """``[n]``: the entry of each token in its row of ``[n, V]``."""
    return table.gather(-1, ids[:, None]).squeeze(-1)


def _in_chunks(
    figures: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    others: Tensor,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Two figures ``[N]`` of each token, from logits in full precision that exist for one chunk of tokens at a time.

    `others` is what else `figures` needs, in the same order: token ids, or the states of another policy.
    """
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(others, chunk_tokens), strict=True)
    first, second = zip(*(figures(full_precision(head(states)), other) for states, other in chunks), strict=True)
    return torch.cat(first), torch.cat(second)


def group_zscore(values: Tensor, group: Tensor, *, standardise: bool = True, eps: float = 1e-6) -> Tensor:
    """``[B]``: ``(x − mean) / (std + eps)`` within each group, with the unbiased std; 0 for a group of one.

    Without `standardise` the mean is only subtracted.
    """
    scaled = torch.zeros_like(values)
    for number in sorted(set(group.tolist())):
        rows = group == number
        members = values[rows]
        if len(members) > 1:
            centred = members - members.mean()
            scaled[rows] = centred / (members.std() + eps) if standardise else centred
    return scaled


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

    ``[N]`` in nats, float32 at least. The teacher's states get no gradient, the head's weights the student's alone. The
    backward pass makes the logits again, so that they exist for one chunk at a time there, too.

    Source: SDPG, arXiv 2606.04036.
    """

    def chunk(states: Tensor, others: Tensor) -> Tensor:
        own = torch.log_softmax(full_precision(head(states)) / temperature, -1)
        with torch.no_grad():
            other = torch.log_softmax(full_precision(head(others)) / temperature, -1)
        return (own.exp() * (own - other)).sum(-1)

    graph = torch.is_grad_enabled()
    parts = zip(torch.split(hidden, chunk_tokens), torch.split(teacher_hidden.detach(), chunk_tokens), strict=True)
    divergences = [checkpoint(chunk, *part, use_reentrant=False) if graph else chunk(*part) for part in parts]
    return torch.cat(divergences)
