"""An objective of one's own: DAPO, in which tokens are blamed less than they are praised."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning import DAPO


@dataclass(frozen=True, kw_only=True)
class LessBlame(DAPO):
    """DAPO with negative advantages scaled down.

    Attributes:
        blame: The factor of negative advantages.
    """

    blame: float = 0.5

    def token_losses(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """The losses of tokens ``[B, T]``; token weights are in their advantages already."""
        scaled = torch.where(advantages < 0, self.blame * advantages, advantages)
        return super().token_losses(logprobs, old_logprobs, scaled, mask)
