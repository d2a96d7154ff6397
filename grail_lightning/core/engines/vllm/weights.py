"""The weights of a policy as a checkpoint of it would name them, one parameter at a time.

They can be sharded by FSDP2: every rank iterates in step with the others, and a parameter is whole on each of them only
while it is handed out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from grail_lightning.core.policy.model import Policy
from grail_lightning.core.runtime.collectives import all_reduce, whole_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_ELEMENTS = 2**18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Named = tuple[str, Tensor]


def checkpoint_weights(policy: Policy) -> Iterator[_Named]:
    """Names and whole tensors, as `save_pretrained` would write them after LoRA adapters are merged.

    Every rank must exhaust the iterator: gathering a sharded parameter is a collective. Tensors may be those of the
    policy itself and are not to be written into.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = policy.model
    converts = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    yield from _converted(model, _merged(model)) if converts else _merged(model)


def _merged(model: PreTrainedModel) -> Iterator[_Named]:
    """Parameters and persistent buffers under their names without adapters, with the adapters' updates added."""
    adapted = {f"{name}.": layer for name, layer in model.named_modules() if hasattr(layer, "base_layer")}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen or ".lora_" in name:
            continue
        seen.add(id(value))
        place, inside, rest = name.rpartition("base_layer.")
        weight = whole_tensor(value)
        if inside and rest == "weight":
            layer = adapted[place]
            for adapter in layer.active_adapters:
                if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                    weight = weight + whole_tensor(layer.get_delta_weight(adapter)).to(weight.dtype)
        yield place + rest, weight


def _converted(model: PreTrainedModel, weights: Iterator[_Named]) -> Iterator[_Named]:
    """The weights in the format of a checkpoint, which may split or join those of one block (a mixture's experts)."""
    from transformers.core_model_loading import revert_weight_conversion

    block: dict[str, Tensor] = {}
    current = ""
    for name, value in weights:
        numbered = re.match(r".*?\.\d+\.", name)
        place = numbered[0] if numbered else ""
        if block and place != current:
            yield from revert_weight_conversion(model, block).items()
            block = {}
        current = place
        block[name] = value
    yield from revert_weight_conversion(model, block).items()


def fingerprint(policy: Policy) -> Tensor:
    """The sum ``[n]`` of the bits of each tensor, element by element, each times its place, modulo 2^64.

    Of sharded weights it is that of this rank's part. Counters of in-place changes would miss optimisers that write
    into `parameter.data`, and plain sums numbers that change places.
    """
    from torch.distributed.tensor import DTensor

    tensors = {id(value): value for value in policy.model.state_dict(keep_vars=True).values()}
    parts = [value.detach() for value in tensors.values() if isinstance(value, Tensor)]
    return torch.stack([_sum(part.to_local() if isinstance(part, DTensor) else part) for part in parts])


def _sum(value: Tensor) -> Tensor:
    bits = value.contiguous().flatten().view(_BITS[value.element_size()])
    total = torch.zeros((), dtype=torch.long, device=value.device)
    for start in range(0, len(bits), _CHUNK_ELEMENTS):
        part = bits[start : start + _CHUNK_ELEMENTS]
        total += (part * torch.arange(start + 1, start + len(part) + 1, device=value.device)).sum()
    return total


def same_on_all_ranks(mine: Tensor, earlier: Tensor | None) -> bool:
    """Whether the fingerprint of no rank has changed. A collective: every rank must call it."""
    changed = earlier is None or earlier.shape != mine.shape or not torch.equal(earlier, mine)
    return not int(all_reduce(torch.tensor(changed, dtype=torch.long, device=mine.device), "max"))


class WeightFile:
    """The newest weights as a safetensors file, in a folder that trainer and servers see under the same path.

    Rank 0 has it. A run that is killed leaves the file, which the next one of the same `name` replaces.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._path = Path(folder).absolute() / f"grail-{name}.safetensors"
        self._writer: int | None = None  # The process that has written it,
        self._written = 0  # and the file's inode: another run of this name replaces it by a file of its own.

    def write(self, version: str, tensors: Iterable[_Named], dtype: torch.dtype) -> str:
        """Replace the earlier weights, which a server that is reading them may go on with; returns the path.

        Matrices are written in the servers' dtype; vectors in their own, since some models keep a few in float32.
        """
        copies = {}
        for name, value in tensors:
            written = dtype if value.is_floating_point() and value.ndim > 1 else value.dtype
            copies[name] = value.detach().to("cpu", written, copy=True).contiguous()
        unfinished, self._writer = self._path.with_suffix(".new"), os.getpid()
        try:
            save_file(copies, unfinished, {"version": version})
            unfinished.replace(self._path)
            self._written = self._path.stat().st_ino
        finally:
            unfinished.unlink(missing_ok=True)
        return str(self._path)

    def close(self) -> None:
        """Remove the file, unless another rank, another run, or the process of which this is a fork has written it."""
        if os.getpid() == self._writer and self._path.exists() and self._path.stat().st_ino == self._written:
            self._path.unlink()
