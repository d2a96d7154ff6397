"""Flash attention for sequences of different lengths, written by hand; it takes what CUDA's kernel takes."""

import math

import torch


def _flash(q, k, v, begin_q, begin_k, most_q, most_k, causal, scale):
    """The output, and the logarithms of the normalisers ``[heads, tokens]``."""
    assert q.dtype == k.dtype == v.dtype, f"queries, keys and values have one dtype, but got {q.dtype} and {k.dtype}"
    assert q.dtype in (torch.float16, torch.bfloat16), f"flash attention takes half precision, but got {q.dtype}"
    assert begin_q.dtype == begin_k.dtype == torch.int32
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    assert q.shape[-1] % 8 == 0
    assert int(begin_q.diff().max()) <= most_q
    assert int(begin_k.diff().max()) <= most_k
    out, norms = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for row, (queries, keys) in _rows(begin_q, begin_k):
        scores, (_, _, values) = _scores(q[queries], k[keys], v[keys], causal, scale)
        norms[:, row] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, norms


def _flash_backward(grad, q, k, v, begin_q, begin_k, causal, scale):
    groups = q.shape[1] // k.shape[1]
    of_q, of_k, of_v = (torch.zeros_like(t) for t in (q, k, v))

    def fold(gradient):
        return gradient.unflatten(1, (-1, groups)).sum(2).to(q.dtype)

    for row, (queries, keys) in _rows(begin_q, begin_k):
        scores, (wide_q, wide_k, wide_v) = _scores(q[queries], k[keys], v[keys], causal, scale)
        share, upper = scores.softmax(-1), grad[row].float()
        of_share = torch.einsum("qhd,khd->hqk", upper, wide_v)
        of_scores = share * (of_share - (of_share * share).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
        of_q[queries] = torch.einsum("hqk,khd->qhd", of_scores, wide_k).to(q.dtype)
        of_k[keys] = fold(torch.einsum("hqk,qhd->khd", of_scores, wide_q))
        of_v[keys] = fold(torch.einsum("hqk,qhd->khd", share, upper))
    return of_q, of_k, of_v


def _rows(begin_q, begin_k):
    """The ranges of each row's queries, twice, and of its keys."""
    queries, keys = ([slice(*pair) for pair in torch.stack([b[:-1], b[1:]], 1).tolist()] for b in (begin_q, begin_k))
    return [(query, (query, key)) for query, key in zip(queries, keys, strict=True)]


def _scores(q, k, v, causal, scale):
    wide = q.float(), *(t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", *wide[:2]) * (scale or q.shape[-1] ** -0.5)
    if causal:
        allowed = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores, wide


def _varlen(q, k, v, begin_q, begin_k, most_q, most_k, causal=False, scale=None, window=None, grouped=False, *_):
    assert grouped or q.shape[1] == k.shape[1]
    causal = causal or (window is not None and window[1] == 0)
    out, norms = _flash(q, k, v, begin_q, begin_k, most_q, most_k, causal, scale)
    return out, norms, torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad, q, k, v, out, norms, begin_q, begin_k, most_q, most_k, causal, _, scale=None, window=None):
    causal = causal or (window is not None and window[1] == 0)
    return _flash_backward(grad, q, k, v, begin_q, begin_k, causal, scale)


KERNELS = {"_varlen_attn": _varlen, "_varlen_attn_backward": _varlen_backward}
"""What runs in place of operators that have no kernel on a CPU, by their names."""
