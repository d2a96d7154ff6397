"""The end of a response: one rule for both sampling methods, applied during decoding.

Shapes: ``n`` rows, ``T`` response tokens, ``t`` of them so far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grail_lightning.batch import Sampling
from grail_lightning.policy import Policy


class Sampled(NamedTuple):
    """The result of a decoding loop.

    Attributes:
        ids: ``[n, T]`` long; ids after a row's end are not part of its response, whatever their value.
        logprobs: ``[n, T]`` float32, the log-probabilities of the ids.
        lengths: ``[n]`` long, the number of tokens of each response, its end included.
        finished: ``[n]`` bool, whether the response ended by itself.
    """

    ids: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor


class Ending:
    """Determines which rows end with their newest token: with an end token, or because it completes a stop string.

    Only response tokens are read, so a stop string that begins in the prompt has no effect. Stop strings are compared
    with the text of all tokens, including special tokens, which the graded text leaves out.

    Args:
        policy: The policy, for its end tokens and its tokenizer.
        sampling: The sampling options, for their stop strings.

    Attributes:
        reach: The number of newest tokens that are read.
    """

    def __init__(self, policy: Policy, sampling: Sampling) -> None:
        from transformers import StopStringCriteria  # Transformers is slow to import, and `--help` is not.

        self.end_tokens = torch.tensor(policy.end_token_ids, dtype=torch.long, device=policy.device)
        self.stops = StopStringCriteria(policy.tokenizer, list(sampling.stop)) if sampling.stop else None
        self.reach: int = 1 if self.stops is None else self.stops.maximum_token_len

    def __call__(self, ids: Tensor) -> Tensor:
        """``[n]`` bool: the rows of ``ids [n, t]`` (response tokens only) that end with their last token."""
        ended: Tensor = (ids[:, -1:] == self.end_tokens).any(1)
        return ended if self.stops is None else ended | self.stops(ids[:, -self.reach :], None)
