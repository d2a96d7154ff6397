"""The clipped surrogate, the KL estimators, and the aggregation of token losses.

Shapes: ``B`` rows, ``T`` response tokens. The named algorithms (GRPO, Dr. GRPO, DAPO, CISPO, GSPO-token) are parameters
of these functions: `grail_lightning.core.objective` has a class for each. Dual clip (1912.09729) is a `ratio_cap`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.core.functional.tokens import masked_mean, masked_sum

Aggregation = Literal["grpo", "dr_grpo", "dapo"]
KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo"]


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3", ratio: Tensor | None = None
) -> Tensor:
    r"""Per-token estimates of ``KL(π ‖ π_ref)`` from samples of π, with ``d = log π_ref − log π``.

    .. math:: k_1 = -d, \quad k_2 = d^2 / 2, \quad k_3 = e^{d} - d - 1

    The gradient of an estimate alone ignores that the samples come from π. In expectation the gradient of k1 is then 0,
    and that of k3 is the gradient of ``KL(π_ref ‖ π)``. With `ratio` (``π / π_old``, carrying its gradient) the product
    ``ratio · estimate`` has the correct gradient. The gradient of k2 alone, ``−d ∇ log π``, is correct on samples of π,
    although the mean of k2 is not the KL. For samples of π_old it is therefore multiplied by the ratio's value.

    Args:
        logprobs: ``[B, T]``, log-probabilities of the policy.
        ref_logprobs: ``[B, T]``, log-probabilities of the reference.
        estimator: k1 | k2 | k3.
        ratio: ``[B, T]``, the importance ratio; None returns the estimate alone.

    Returns:
        ``[B, T]`` in nats.

    Source: Schulman, "Approximating KL divergence" (2020); correction: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    d = ref_logprobs - logprobs
    match estimator:
        case "k1":
            estimate = -d
        case "k2":
            estimate = d.square() / 2
        case "k3":
            estimate = torch.expm1(d) - d
        case _:
            raise ValueError(f"`estimator` must be one of k1, k2, k3, but got {estimator!r}.")
    if ratio is None:
        return estimate
    return (ratio.detach() if estimator == "k2" else ratio) * estimate


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None, level: Level = "token") -> Tensor:
    """``π / π_old`` at each token, ``[B, T]``; at level "sequence" its geometric mean over the row (GSPO-token).

    The sequence ratio has the same value for all tokens of a row, but each token's own gradient, so that token weights
    have an effect: ``sg(s) · exp(lp − sg(lp))``.

    Source: GSPO, arXiv 2507.18071, equation 13.
    """
    log_ratio = logprobs - old_logprobs
    if level == "token":
        return log_ratio.exp()
    if level != "sequence" or mask is None:
        raise ValueError(f"`level` must be token, or sequence with a `mask`, but got {level!r} and {mask}.")
    sequence = masked_mean(log_ratio.detach(), mask, dim=1)[:, None]
    return (sequence + logprobs - logprobs.detach()).exp()


def check_clip(clip_low: float, clip_high: float, ratio_cap: float | None, surrogate: Surrogate) -> None:
    """Check the clip range and the cap of `clipped_surrogate`; a ValueError names the one that is wrong."""
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(f"`clip_low` must lie in [0, 1] and `clip_high` be ≥ 0, but got {clip_low} and {clip_high}.")
    if ratio_cap is not None and not 1 + clip_high <= ratio_cap < math.inf:
        raise ValueError(
            f"`ratio_cap` must be finite and at least 1 + clip_high = {1 + clip_high:g}, but got {ratio_cap}. "
            "Use null to switch it off; without an upper clip it has nothing to act on."
        )
    if surrogate not in ("clip", "cispo"):
        raise ValueError(f"`surrogate` must be clip or cispo, but got {surrogate!r}.")
    if surrogate == "cispo" and ratio_cap is not None:
        raise ValueError(f"`ratio_cap` must be null with `surrogate` cispo, but got {ratio_cap}. Set `clip_high`.")


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_cap: float | None = None,
    mask: Tensor | None = None,
    level: Level = "token",
    surrogate: Surrogate = "clip",
) -> Tensor:
    r"""The clipped policy-gradient loss of each token.

    .. math:: \ell_t = -\min(\rho_t A_t,\ \mathrm{clip}(\rho_t, 1-\epsilon_{low}, 1+\epsilon_{high}) A_t)

    A clipped token has no gradient. With `surrogate` "cispo" it has one, whose weight is bounded:

    .. math:: \ell_t = -\mathrm{sg}(\mathrm{clip}(\rho_t, 1-\epsilon_{low}, 1+\epsilon_{high}))\, A_t \log\pi_t

    The cap on the unclipped ratio limits the loss of tokens with a negative advantage. It is also the constant ``c`` of
    dual clip: where ``A < 0``, ``max(min(ρ A, clip(ρ) A), c A)`` has the same value and the same gradient.

    Advantages are given per token, so token credit is ``advantages[:, None] * weights``, whatever the credit method.

    Args:
        logprobs: ``[B, T]``, log-probabilities of the policy, with gradient; the result has this shape.
        old_logprobs: ``[B, T]``, log-probabilities under the weights from before the update.
        advantages: ``[B, T]``, or ``[B, 1]``.
        clip_low: ``ε_low``.
        clip_high: ``ε_high`` ("clip higher"); infinity is off.
        ratio_cap: Upper bound on the unclipped ratio, at least ``1 + clip_high``; not with "cispo", whose ratio is
            bounded already.
        mask: ``[B, T]`` bool; only level "sequence" needs it.
        level: "token", or "sequence" for GSPO-token.
        surrogate: clip | cispo.

    Source: PPO, arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476; cap: INTELLECT-2, arXiv 2505.07291; dual clip:
    arXiv 1912.09729; CISPO: MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    check_clip(clip_low, clip_high, ratio_cap, surrogate)
    ratio = importance_ratio(logprobs, old_logprobs, mask, level)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "cispo":
        return -clipped.detach() * advantages * logprobs
    if ratio_cap is not None:
        ratio = ratio.clamp(max=ratio_cap)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def check_cap(cap: float) -> None:
    """Check the bound of `sampler_correction`; a ValueError if it is below 1 or not finite."""
    if not 1 <= cap < math.inf:
        raise ValueError(
            f"`sampler_cap` must be finite and at least 1, but got {cap}. Use null to switch the correction off."
        )


def sampler_correction(trainer_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    r"""Truncated importance weights for rollouts that were sampled by another program, or with earlier weights.

    .. math:: c_t = \min\left(\frac{\pi_{trainer}(y_t)}{\pi_{sampler}(y_t)},\ C\right)

    The trainer's probability is that from before the batch's first optimiser step. The sampler's differs if it computes
    in another precision or with other kernels, or with the weights of a batch earlier (`execution.sample_ahead`). The
    result multiplies the loss of each token. It is 1 where the sampler reported no log-probability (NaN).

    ``[B, T]`` each, without gradient; `cap` is C.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    """
    check_cap(cap)
    ratio = (trainer_logprobs.detach() - sampler_logprobs).exp().clamp(max=cap)
    return ratio.masked_fill(sampler_logprobs.isnan(), 1)


def aggregate(
    token_losses: Tensor,
    mask: Tensor,
    how: Aggregation,
    *,
    num_rollouts: Tensor | int,
    num_tokens: Tensor | int,
    max_response_length: int,
) -> Tensor:
    r"""The sum of token losses, divided by denominators of the whole optimiser step.

    - ``grpo``: :math:`\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t \ell_{it}`
    - ``dr_grpo``: :math:`\frac{1}{N L_{max}} \sum_i \sum_t \ell_{it}`
    - ``dapo``: :math:`\frac{1}{\sum_i |o_i|} \sum_i \sum_t \ell_{it}`

    Because the counts are arguments, the results of micro-batches and ranks add up to that of one large batch.

    Args:
        token_losses: ``[B, T]``, the losses of the tokens.
        mask: ``[B, T]`` bool; numerator and denominator use this one mask.
        how: grpo | dr_grpo | dapo.
        num_rollouts: ``N``, rollouts with at least one valid token in the optimiser step, over all ranks.
        num_tokens: Valid tokens in the optimiser step, over all ranks.
        max_response_length: The limit of the response in tokens.

    Strategies average gradients over ranks, so the caller multiplies the result by the number of ranks (`Update` does).

    Source: DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv 2503.14476.
    """
    # At least 1, so that an empty optimiser step has loss 0, not 0/0.
    rollouts, tokens = (torch.as_tensor(count).clamp(min=1) for count in (num_rollouts, num_tokens))
    match how:
        case "grpo":
            return masked_mean(token_losses, mask, dim=1).sum() / rollouts
        case "dr_grpo":
            return masked_sum(token_losses, mask) / (rollouts * max_response_length)
        case "dapo":
            return masked_sum(token_losses, mask) / tokens
        case _:
            raise ValueError(f"`how` must be one of grpo, dr_grpo, dapo, but got {how!r}.")
