"""Pure functions of tensors, without state, configuration, model or logger."""

from grail_lightning.core.functional.advantages import group_advantages
from grail_lightning.core.functional.pass_at_k import maj_at_k, pass_at_k, pass_at_k_variance
from grail_lightning.core.functional.policy_gradient import aggregate, clipped_surrogate, kl_estimate
from grail_lightning.core.functional.tokens import (
    TokenStats,
    masked_mean,
    masked_sum,
    masked_zscore,
    token_logprobs,
    token_stats,
)
from grail_lightning.core.functional.weighting import answer_overwrite, bilevel_map, grail_map, mean_one

__all__ = [
    "TokenStats",
    "aggregate",
    "answer_overwrite",
    "bilevel_map",
    "clipped_surrogate",
    "grail_map",
    "group_advantages",
    "kl_estimate",
    "maj_at_k",
    "masked_mean",
    "masked_sum",
    "masked_zscore",
    "mean_one",
    "pass_at_k",
    "pass_at_k_variance",
    "token_logprobs",
    "token_stats",
]
