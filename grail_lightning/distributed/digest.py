"""A hash of a policy's weights, whole or sharded."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from grail_lightning.runtime.collectives import whole_tensor


def weights_digest(module: nn.Module) -> str:
    """The SHA-256 of all weights with their names, types and shapes.

    It does not depend on the number of ranks, nor on the device. Sharded weights are gathered one at a time: a
    collective, which every rank must call.
    """
    found = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        values = whole_tensor(weight).cpu().contiguous()
        found.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
