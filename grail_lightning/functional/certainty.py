"""The policy's certainty about its tokens, and comparisons of figures within a batch.

Shapes: ``B`` rows, ``T`` response tokens, ``D`` width, ``V`` vocabulary, ``N`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.functional.tokens import DEFAULT_CHUNK_TOKENS, full_precision


def quantile_of_all(values: Tensor, q: float) -> Tensor:
    """The interpolated quantile of ``[N]`` values, float64; 0 if ``N = 0``. `torch.quantile` is limited to 16 million.

    Raises:
        ValueError: If `q` is not in ``[0, 1]``.
    """
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

    Up to a constant, ``c`` is the divergence of the policy from a uniform one; it carries no gradient.

    Args:
        hidden: ``[N, D]`` states that predict the tokens (already shifted).
        head: A function from hidden states ``[n, D]`` to logits ``[n, V]``.
        token_ids: ``[N]`` long.
        temperature: The number by which the logits are divided for `c`; the token's own logit is not divided.
        chunk_tokens: Positions whose logits exist at one time.

    Returns:
        ``c`` and the token's logit, ``[N]`` each.

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

    Args:
        hidden: ``[N, D]`` states that predict the tokens (already shifted).
        head: A function from hidden states ``[n, D]`` to logits ``[n, V]``.
        token_ids: ``[N]`` long.
        temperature: The number by which the logits are divided.
        chunk_tokens: Positions whose logits exist at one time.

    Returns:
        Both figures, ``[N]`` each.
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

    Args:
        hidden: ``[N, D]`` states of the first policy that predict the tokens (already shifted).
        other_hidden: ``[N, D']``, those of the second policy.
        head: A function from states of the first policy ``[n, D]`` to logits ``[n, V]``.
        other_head: The same of the second policy.
        temperature: The number by which the logits of both are divided.
        chunk_tokens: Positions whose logits exist at one time.

    Returns:
        ``d`` in [0, 1] and ``H`` in nats, ``[N]`` each.
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
    r"""``(x − mean) / (std + eps)`` within each group, with the unbiased std; 0 for a group of one.

    Args:
        values: ``[B]``, the values to standardise.
        group: ``[B]`` long, the group of each row.
        standardise: Whether to divide by the standard deviation; False only subtracts the mean.
        eps: A small number that is added to the standard deviation.

    Returns:
        ``[B]``.
    """
    scaled = torch.zeros_like(values)
    for number in sorted(set(group.tolist())):
        rows = group == number
        members = values[rows]
        if len(members) > 1:
            centred = members - members.mean()
            scaled[rows] = centred / (members.std() + eps) if standardise else centred
    return scaled
