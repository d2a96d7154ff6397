"""An engine that fails on the second rank alone."""

import torch

from grail_lightning.engines import HFEngine


class Failing(HFEngine):
    """Raises in its fourth call, except on the first rank, which goes on to the next collective."""

    calls = 0

    def generate(self, *arguments):
        self.calls += 1
        if self.calls == 4 and torch.distributed.get_rank() > 0:
            raise ValueError("this share of the batch is wrong")
        return super().generate(*arguments)
