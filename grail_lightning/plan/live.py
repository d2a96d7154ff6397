"""The bytes of living tensors, counted at each operation. It works on tensors without data, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operations inside the context allocate, until it is freed. Views count once.

    Workspaces inside an operation (of a library's kernel, say) are not seen.

    Attributes:
        now: The bytes that are allocated at present.
        peak: The most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count the storages that it has made."""
        given = set(map(id, _storages((args, kwargs))))
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if id(storage) not in given:
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        size = int(storage.nbytes())
        self._seen[storage] = None
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in a tree. Sparse tensors have none; the tensors inside them are counted."""
    for tensor in tree_iter(tree):
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            yield tensor.untyped_storage()
