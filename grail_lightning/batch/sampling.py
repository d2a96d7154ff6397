"""Options of sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Options with which responses are sampled. Training and evaluation have one set each.

    Attributes:
        max_response_length: Most tokens of a response, its end token included.
        temperature: The number by which the logits are divided. 0 is greedy; log-probabilities are then reported at
            temperature 1.
        top_p: Samples from the smallest set of tokens with at least this probability; 1 is off.
        top_k: Samples from this number of most likely tokens; 0 is off.
        stop: Strings that end a response and stay part of it. They may be special tokens (``<|im_end|>``).
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_response_length < 1:
            raise ValueError(f"`max_response_length` must be at least 1 token, but got {self.max_response_length}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be 0 (greedy) or positive and finite, but got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie in (0, 1], but got {self.top_p}. Use 1 to switch it off.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be 0 (off) or positive, but got {self.top_k}.")
        if isinstance(self.stop, str):  # type: ignore[unreachable]
            raise ValueError(
                f"`stop` must be a list of strings, but got the string {self.stop!r}. Write [{self.stop!r}]."
            )
        if "" in self.stop:
            raise ValueError(f"`stop` must hold strings of at least one character, but got {list(self.stop)}.")

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which log-probabilities are computed."""
        return self.temperature or 1.0
