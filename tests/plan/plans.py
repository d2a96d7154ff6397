"""Settings and planners for tests, on the packaged policy unless they say otherwise."""

from functools import partial

import torch

from grail_lightning.batch import Sampling
from grail_lightning.plan.capacity import Planner
from grail_lightning.plan.seconds import PRESETS
from grail_lightning.plan.settings import Settings
from grail_lightning.policy import Loading
from grail_lightning.policy.options import read_config
from grail_lightning.step.options import Execution


def settings(**changes):
    """Settings of a small run on one CPU process."""
    options = {
        "policy": "arithmetic",
        "loading": Loading(),
        "sampling": Sampling(max_response_length=48),
        "execution": Execution(group_size=4, token_budget=512),
        "optimizer": partial(torch.optim.AdamW, lr=1e-4),
        "device": "cpu",
        "prompts_per_batch": 4,
        "prompt_tokens": 11,
        "response_tokens": 48.0,
    }
    return Settings(**options | changes)


def planner(policy="arithmetic"):
    """A planner with the rates of an H100."""
    return Planner(read_config(policy), PRESETS["h100"])
