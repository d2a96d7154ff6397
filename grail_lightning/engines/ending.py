"""Where a response ends: one rule for both sampling methods, applied while they decode.

Shapes: ``n`` rows, ``T`` response tokens, ``t`` of them so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grail_lightning.batch import Sampling
from grail_lightning.policy import Policy


class Sampled(NamedTuple):
    """What a decoding loop gives.

    Attributes:
        ids: ``[n, T]`` long; what follows a row's end is not part of its response, whatever the ids are.
        logprobs: ``[n, T]`` float32, their log-probabilities.
        lengths: ``[n]`` long, the tokens of each response, its end included.
        finished: ``[n]`` bool, whether it ended by itself.
    """

    ids: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor


class Ending:
    """Tells which rows end with their newest token: by an end token, or because it completes a stop string.

    Only response tokens are read, so a stop string that begins in the prompt ends nothing. Stop strings are compared
    with the tokens themselves, special ones included, which the decoded text leaves out.

    Args:
        policy: Its end tokens and its tokenizer.
        sampling: Its stop strings.

    Attributes:
        reach: How many of the newest tokens are read.
    """

    def __init__(self, policy: Policy, sampling: Sampling) -> None:
        from transformers import StopStringCriteria  # Transformers is slow to import; `--help` is not.

        self.end_tokens = torch.tensor(policy.end_token_ids, dtype=torch.long, device=policy.device)
        self.stops: Any = StopStringCriteria(policy.tokenizer, list(sampling.stop)) if sampling.stop else None
        self.reach: int = 1 if self.stops is None else self.stops.maximum_token_len

    def __call__(self, ids: Tensor) -> Tensor:
        """``[n]`` bool: the rows of ``ids [n, t]``, response tokens alone, that end with their last token."""
        ended: Tensor = (ids[:, -1:] == self.end_tokens).any(1)
        return ended if self.stops is None else ended | self.stops(ids[:, -self.reach :], None)


class EndRecorder:
    """A stopping criterion for Transformers' `generate` that keeps where each row ends.

    It cannot be told from the ids afterwards: `generate` fills finished rows up, and the pad token may be an end token.

    Args:
        ending: The rule.
        shape: Rows and prompt columns of the call.

    Attributes:
        lengths: ``[n]`` long, the response tokens of each row so far.
        finished: ``[n]`` bool.
    """

    def __init__(self, ending: Ending, shape: torch.Size) -> None:
        self.ending, self.prompt_width = ending, shape[1]
        self.lengths = torch.zeros(shape[0], dtype=torch.long, device=ending.end_tokens.device)
        self.finished = torch.zeros_like(self.lengths, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """``[n]`` bool: the rows that have finished."""
        self.lengths = self.lengths + ~self.finished
        self.finished = self.finished | self.ending(input_ids[:, self.prompt_width :])
        return self.finished
