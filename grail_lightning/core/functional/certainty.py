"""Figures of whole distributions (certainty, divergence from another policy), and comparisons within a batch.

Shapes: ``B`` rows, ``D`` width, ``V`` vocabulary, ``N`` tokens, ``n`` tokens of a chunk. Logits ``[n, V]`` are divided
by the temperature; states ``[N, D]`` are those that predict the tokens (already shifted).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.core.functional.advantages import group_std, group_sums
from grail_lightning.core.functional.tokens import DEFAULT_CHUNK_TOKENS, full_precision, in_chunks

Figures = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""A function of logits ``[n, V]``, token ids ``[n]`` and the temperature that returns two figures ``[n]``."""

_STD_EPS = 1e-6


def self_certainty(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    r"""Self-certainty at each token, and the token's own logit, ``[n]`` each.

    .. math:: c = \log\sum_v e^{z_v} - \frac{1}{V} \sum_v z_v, \qquad z = \mathrm{logits} / \tau

    Up to a constant, ``c`` is the divergence of the policy from a uniform one. The token's own logit is not divided by
    the temperature.

    Source: self-certainty, arXiv 2502.18581; as UCAS uses it, arXiv 2510.10649.
    """
    logits = full_precision(logits)
    scaled = logits / temperature
    return scaled.logsumexp(-1) - scaled.mean(-1), logits.gather(-1, token_ids[:, None]).squeeze(-1)


def repeat_probability(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    r"""Each token's probability, and the probability that two draws at its position are equal, ``[n]`` each.

    .. math:: \pi(y), \qquad \sum_v \pi(v)^2, \qquad \pi = \mathrm{softmax}(\mathrm{logits} / \tau)
    """
    probabilities = torch.softmax(full_precision(logits) / temperature, -1)
    return probabilities.gather(-1, token_ids[:, None]).squeeze(-1), probabilities.square().sum(-1)


def hellinger(logits: Tensor, other_logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    r"""The squared Hellinger distance of two policies, and the entropy of the first one, ``[n]`` each.

    .. math:: d = 1 - \sum_v \sqrt{\pi(v)\, \pi'(v)} \in [0, 1], \qquad H = -\sum_v \pi(v) \log \pi(v) \text{ in nats}
    """
    logprobs = torch.log_softmax(full_precision(logits) / temperature, -1)
    other = torch.log_softmax(full_precision(other_logits) / temperature, -1)
    return (1 - ((logprobs + other) / 2).exp().sum(-1)).clamp(0, 1), -(logprobs.exp() * logprobs).sum(-1)


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

    def chunk(states: Tensor, others: Tensor) -> tuple[Tensor]:
        logprobs = torch.log_softmax(full_precision(head(states)) / temperature, -1)
        with torch.no_grad():
            other = torch.log_softmax(full_precision(head(others)) / temperature, -1)
        return ((logprobs.exp() * (logprobs - other)).sum(-1),)

    graph = torch.is_grad_enabled()
    (divergence,) = in_chunks(chunk, hidden, teacher_hidden.detach(), chunk_tokens, recompute=graph)
    return divergence


def quantile_of_all(values: Tensor, q: float) -> Tensor:
    """The interpolated quantile of ``[N]`` values, float64, 0 without any. `torch.quantile` takes 16 million."""
    if not len(values):
        return values.new_zeros((), dtype=torch.float64)
    ordered = values.double().sort().values
    position = q * (len(values) - 1)
    low, high = ordered[int(position)], ordered[min(int(position) + 1, len(values) - 1)]
    return low + (high - low) * (position - int(position))


def group_zscore(values: Tensor, group: Tensor, *, standardise: bool = True) -> Tensor:
    """``[B]``: ``(x − mean) / (std + 1e-6)`` within each group, with the unbiased std; 0 for a group of one.

    Without `standardise` the mean is only subtracted.
    """
    total, size = group_sums(values, group)
    centred = values - total / size
    return centred / (group_std(values, group) + _STD_EPS) if standardise else centred
