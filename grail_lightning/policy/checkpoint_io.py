"""Reading checkpoints in which the optimiser's state is quantised."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH


class HostCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but tensors are read to the host by name.

    Lightning gives `torch.load` a function for that, which torch does not take for tensors that are made of others
    (`torch._utils._rebuild_wrapper_subclass`): torchao's 8-bit state. For all others both do the same.
    """

    def load_checkpoint(
        self, path: _PATH, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, on the host, wherever it was saved from."""
        host: Any = "cpu"
        found: dict[str, Any] = super().load_checkpoint(path, host, weights_only)
        return found
