"""The weights of a policy as a checkpoint of it would name them, one parameter at a time.

They can be sharded by FSDP2: every rank iterates in step with the others, and a parameter is whole on each of them only
while it is handed out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_reduce, whole_tensor

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_CHUNK_ELEMENTS = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = tuple[str, Tensor]


def checkpoint_weights(policy: Policy) -> Iterator[Named]:
    """Names and whole tensors, as `save_pretrained` would write them after LoRA adapters are merged.

    Tied weights are handed out once, under the name of the first. Where the checkpoint's format splits or joins what
    the model holds (the experts of a mixture), the parameters of one decoder block are converted together.

    Every rank must exhaust the iterator: gathering a sharded parameter is a collective. Tensors may be those of the
    policy itself and are not to be written into.
    """
    model = policy.model
    merged = _merged(model)
    yield from _converted(model, merged) if _has_conversions(model) else merged


def _merged(model: PreTrainedModel) -> Iterator[Named]:
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
            weight = _with_update(adapted[place], weight)
        yield place + rest, weight


def _with_update(layer: LoraLayer, weight: Tensor) -> Tensor:
    r"""A weight with the update of its active adapters, :math:`W + \sum_a s_a B_a A_a`, in the weight's dtype."""
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            update = whole_tensor(up) @ whole_tensor(down)
            turned = update.T if getattr(layer, "fan_in_fan_out", False) else update
        elif adapter in layer.lora_embedding_A:
            turned = (whole_tensor(layer.lora_embedding_B[adapter]) @ whole_tensor(layer.lora_embedding_A[adapter])).T
        else:
            continue
        weight = weight + (turned * layer.scaling[adapter]).to(weight.dtype)
    return weight


def _has_conversions(model: PreTrainedModel) -> bool:
    """Whether a checkpoint of this architecture names or shapes its weights in another way than the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))


def _converted(model: PreTrainedModel, weights: Iterator[Named]) -> Iterator[Named]:
    """The weights in the format of a checkpoint. Those of one decoder block are whole at the same time."""
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
    """Three numbers of each parameter and buffer, ``[n, 3]`` long, of this rank's part where it is sharded.

    Two are sums of its bits modulo 2^64, plain and with each row counted with its number; the third counts in-place
    changes (`Tensor._version`). The count alone would miss optimisers that write into `parameter.data`; the sums alone
    would miss numbers that change places within a row.
    """
    from torch.distributed.tensor import DTensor

    tensors = {id(value): value for value in policy.model.state_dict(keep_vars=True).values()}
    rows = []
    for value in tensors.values():
        if isinstance(value, Tensor):
            part = value.detach()
            changes = -1 if value.is_inference() else value._version
            rows.append((*_sums(part.to_local() if isinstance(part, DTensor) else part), changes))
    sums = torch.stack([torch.stack(row[:2]) for row in rows])
    return torch.cat([sums, torch.tensor([[row[2]] for row in rows], device=sums.device)], 1)


def _sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the bits, and the sum weighted by the number of the row, both long."""
    if not value.numel():  # A rank's part of a tensor with fewer rows than there are ranks.
        nothing = torch.zeros((), dtype=torch.long, device=value.device)
        return nothing, nothing
    rows = value.contiguous().reshape(len(value) if value.ndim else 1, -1)
    bits = rows.view(_BITS[value.element_size()])
    step = max(1, _CHUNK_ELEMENTS // bits.shape[1])
    of_rows = torch.cat([bits[k : k + step].sum(1, dtype=torch.int64) for k in range(0, len(bits), step)])
    return of_rows.sum(), (of_rows * torch.arange(1, len(of_rows) + 1, device=of_rows.device)).sum()


def same_on_all_ranks(mine: Tensor, earlier: Tensor | None) -> bool:
    """Whether the fingerprint of no rank has changed. A collective: every rank must call it."""
    changed = earlier is None or earlier.shape != mine.shape or not torch.equal(earlier, mine)
    return not int(all_reduce(torch.tensor(changed, dtype=torch.long, device=mine.device), "max"))


class WeightFile:
    """The newest weights as a safetensors file that servers read. Rank 0 has it.

    Without a folder it is a file without a name, in memory where there is room. A process of the same user opens it by
    ``/proc/PID/fd/N``, and the kernel frees it when the trainer ends, however it ends.

    Args:
        folder: A folder that trainer and servers see under the same path.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self._file: IO[bytes] | None = None

    def write(self, version: str, tensors: Iterable[Named], dtype: torch.dtype) -> str:
        """Write new weights in place of the earlier ones, which a server that is reading them may go on with.

        Args:
            version: The name of these weights.
            tensors: Names and whole tensors, on any device: they are taken to the CPU one at a time.
            dtype: The dtype in which the servers compute. Matrices are written in it; vectors, which cost nothing, in
                their own, since some models keep a few of them in float32.

        Returns:
            The path under which servers find it.
        """
        self.close()
        copies = {name: _on_cpu(value, dtype) for name, value in tensors}
        room = self.folder or _roomy_folder(sum(value.nbytes for value in copies.values()))
        named = self.folder is not None or not Path("/proc/self/fd").exists()
        path = room / f"grail-{version}.safetensors"
        # Without a name from the beginning: one that is killed while it writes leaves nothing.
        self._file = open(path, "wb") if named else tempfile.TemporaryFile(dir=room)  # noqa: SIM115  (it stays open)
        try:
            _write_tensors(self._file, copies, version)
        except BaseException:
            self.close()
            raise
        if not named:
            return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._file.close()  # Other machines may see the whole file only then.
        return str(path)

    def close(self) -> None:
        """Give up the file."""
        if self._file is not None:
            file, self._file = self._file, None
            if isinstance(file.name, str):  # Else the number of a file without a name.
                Path(file.name).unlink(missing_ok=True)
            file.close()


def _write_tensors(file: IO[bytes], tensors: dict[str, Tensor], version: str) -> None:
    """Write tensors in the format of safetensors, whose own writer takes no open file. Each is given up then."""
    from safetensors.torch import save

    # The header of empty tensors has the names of their dtypes; places and shapes follow.
    header = json.loads(save({name: value.new_empty(0) for name, value in tensors.items()}, {"version": version})[8:])
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # Every number at a multiple of its size.
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(tensors.pop(name).flatten().view(torch.uint8).numpy().data)
    file.flush()


def _on_cpu(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy with memory of its own, as safetensors wants it."""
    as_written = dtype if value.is_floating_point() and value.ndim > 1 else value.dtype
    return value.detach().to("cpu", as_written, copy=True).contiguous()


def _roomy_folder(size: int) -> Path:
    memory = Path("/dev/shm")  # noqa: S108
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > size
    return memory if has_room else Path(tempfile.gettempdir())
