"""A CUDA device that is none: tensors have values on the CPU and say that they are on ``cuda:0``.

`install` makes it, in a process of its own: it replaces functions of `torch.cuda`, and a library that `guard.cpp` has
been built into must be loaded before torch. Every operator is checked for mixed devices as CUDA does it, counted as a
kernel unless it makes a view, and noted as a wait if the host would wait for the device in it. A graph captures
operators without an effect, refuses waits, and repeats the operators on the same tensors. What it cannot show:
times, memory, limits of kernels (but the dtypes that flash attention takes), several ranks.

It uses parts of torch that are not public, of one release.
"""

import contextlib
import sys
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, _pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.fake_cuda.attention import KERNELS

CUDA = torch.device("cuda", 0)


def _names(text):
    return set(text.split())


_VIEWS = _names(
    "view _unsafe_view reshape _reshape_alias transpose t permute slice select unsqueeze squeeze expand detach alias "
    "split split_with_sizes unbind as_strided diagonal narrow unfold lift_fresh"
)
NO_KERNEL = _VIEWS | _names(
    "empty empty_like new_empty empty_strided new_empty_strided resize_ set_ record_stream _local_scalar_dense"
)
_ACROSS_DEVICES = {"_to_copy", "copy_", "set_", "detach", "alias", "lift_fresh", "record_stream"}
_NO_SCALARS = _names(
    "cat stack gather scatter scatter_ scatter_add scatter_add_ scatter_reduce index_select index_add index_add_ "
    "index_copy index_copy_ mm bmm addmm addmm_ baddbmm embedding embedding_dense_backward searchsorted masked_scatter "
    "masked_select native_layer_norm _softmax _log_softmax cumsum logsumexp"
)
"""Kernels that refuse a CPU tensor without dimensions beside CUDA tensors; pointwise ones accept it."""
_WAITING = _names(
    "nonzero _local_scalar_dense masked_select masked_scatter_backward unique_dim _unique2 unique_consecutive equal "
    "bincount"
)
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class MixedDevicesError(RuntimeError):
    """What CUDA would refuse, or answer with a copy of an index to the device."""


class Place(NamedTuple):
    """Where the host starts a kernel, or waits for the device."""

    what: str
    chain: tuple[str, ...]  # The package's functions on the stack, ``file:function``, innermost first.

    def __str__(self):
        return f"{self.what} in {self.chain[0]}"


class Log:
    """What has run on the device since `clear`."""

    def __init__(self):
        self.kernels, self.waits, self.captured = Counter(), Counter(), Counter()

    def clear(self):
        for counter in (self.kernels, self.waits, self.captured):
            counter.clear()

    def wait(self, kind):
        if Graph.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind} in {_chain()[0]}")
        self.waits[Place(kind, _chain())] += 1


LOG = Log()


def _chain():
    frame, found = sys._getframe(2), []
    while frame is not None:
        name = frame.f_code.co_filename
        if "grail_lightning/" in name:
            found.append(f"{name.rpartition('grail_lightning/')[2]}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found) or ("outside",)


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA, around one on the CPU."""

    @staticmethod
    def __new__(cls, values):
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "layout": values.layout}
        if values.layout != torch.strided:
            layout = {"layout": values.layout}
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, device=CUDA, **layout)

    def __init__(self, values):
        self.values_here = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    def __repr__(self):
        return f"OnCuda({self.values_here!r})"

    def tolist(self):
        LOG.wait("tolist")
        return self.values_here.tolist()


def _inside(value):
    return value.values_here if isinstance(value, OnCuda) else value


def _outside(value):
    return OnCuda(value) if isinstance(value, torch.Tensor) and not isinstance(value, OnCuda) else value


def _tensors(values):
    return [value for value in _pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def _run(function, args, kwargs):
    """Run an operator on the values, as CUDA would if one of its tensors or its device is there."""
    name = function._schema.name.partition("::")[2]
    flat, spec = _pytree.tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnCuda)]
    device = kwargs.get("device")
    results_there = bool(there) if device is None else _is_cuda(device)
    on_cuda = results_there or bool(there)
    if on_cuda:
        if len(there) < len(tensors):
            _check_devices(function, name, args, tensors)
        _note(name, args, kwargs, there, results_there)
    args, kwargs = _pytree.tree_unflatten([_inside(value) for value in flat], spec)
    if on_cuda:
        kwargs |= {"device": torch.device("cpu")} if _is_cuda(device) else {}
        kwargs |= {"pin_memory": False} if "pin_memory" in kwargs else {}
        kwargs |= {"non_blocking": False} if "non_blocking" in kwargs else {}
    kernel = KERNELS.get(name, function) if on_cuda else function
    if on_cuda and Graph.capturing is not None:
        results = Graph.capturing.capture(kernel, function, args, kwargs)
    else:
        results = kernel(*args, **kwargs)
    if not results_there:
        return results
    return _results(function, *_pytree.tree_unflatten(flat, spec), results)


def _results(function, args, kwargs, results):
    """The results as tensors on CUDA; what an operator has changed in place is returned itself."""
    schema = function._schema
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [named[name] for name in writes if name in named]
    if written and not schema.returns:
        return None
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    outside = _pytree.tree_map(_outside, results)
    if any(result.alias_info is not None for result in schema.returns):
        with contextlib.suppress(Exception):
            return return_and_correct_aliasing(function, args, kwargs, outside)
    return outside


def _check_devices(function, name, args, tensors):
    if name in _ACROSS_DEVICES or name.endswith("_like") or name.startswith("new_"):
        return
    here = [tensor for tensor in tensors if not isinstance(tensor, OnCuda)]
    table = name in _INDEXING and isinstance(args[0], OnCuda)
    indices = [t for t in args[1] if isinstance(t, torch.Tensor) and not isinstance(t, OnCuda)] if table else []
    if indices or not (table or all(tensor.dim() == 0 for tensor in here)) or name in _NO_SCALARS:
        devices = [(tuple(tensor.shape), tensor.device.type) for tensor in tensors]
        raise MixedDevicesError(f"{function} of tensors {devices} in {_chain()[0]}")


def _note(name, args, kwargs, there, results_there):
    """Count a kernel, and the waits of an operator."""
    source = args[1] if name == "copy_" else args[0] if args else None
    if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        LOG.wait(name)
    elif name in ("_to_copy", "copy_") and isinstance(source, torch.Tensor):
        target_there = results_there if name == "_to_copy" else isinstance(args[0], OnCuda)
        if isinstance(source, OnCuda) != target_there:
            asks = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if not (asks and getattr(source, "is_pinned_here", False)):
                LOG.wait("copy to the device" if target_there else "copy from the device")
            return  # It is no kernel.
    elif name in _INDEXING:
        masks = any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1])
        if masks and not (name != "index" and args[2].numel() == 1):  # That one is `masked_fill`.
            LOG.wait(f"{name} by a mask")
    if name not in NO_KERNEL:
        LOG.kernels[Place(name, _chain())] += 1


class Graph:
    """A `torch.cuda.CUDAGraph`: kernels that are repeated on the tensors with which they were captured."""

    capturing = None

    def __init__(self):
        self.work, self.before = [], {}

    def capture(self, kernel, function, args, kwargs):
        """Run a kernel for the shapes of its results, and keep what is to be repeated: all but views."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors((args, kwargs))}
        for pointer, storage in storages.items():
            self.before.setdefault(pointer, (storage, storage.clone()))
        results = kernel(*args, **kwargs)
        made = [t for t in _tensors(results) if t.untyped_storage().data_ptr() not in storages]
        if made or any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments):
            self.work.append((kernel, args, kwargs, made))
        return results

    def replay(self):
        LOG.kernels[Place("graph", _chain())] += 1
        for kernel, args, kwargs, made in self.work:
            results = kernel(*args, **kwargs)
            for tensor, values in zip(made, _tensors(results) if made else (), strict=True):
                tensor.copy_(values)


@contextlib.contextmanager
def _capture(graph, **_):
    LOG.wait("synchronize")
    before = LOG.kernels.copy()
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None
        LOG.captured += LOG.kernels - before
        LOG.kernels = before
        for storage, values in graph.before.values():
            storage.copy_(values)
        graph.before = {}


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that make tensors of Python's numbers, or read them, without an operator."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        makes = function in (torch.tensor, torch.as_tensor, torch.scalar_tensor)
        if makes and not isinstance(args[0], OnCuda) and _is_cuda(kwargs.get("device") or torch.get_default_device()):
            graph = kwargs.pop("requires_grad", False)
            return function(*args, **kwargs | {"device": "cpu"}).to(CUDA).requires_grad_(graph)
        if function is torch.Tensor.tolist and isinstance(args[0], OnCuda):
            return OnCuda.tolist(args[0])
        if function is torch.Tensor.new_tensor and isinstance(args[0], OnCuda):
            made = torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype))
            return made.to(kwargs.get("device") or CUDA)
        if function is torch.Tensor.pin_memory:
            (copied := args[0].clone()).is_pinned_here = True
            return copied
        return function(*args, **kwargs)


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def synchronize(self):
        LOG.wait("event")

    def elapsed_time(self, other):
        return 1.0


def _answer(value, *args, **kwargs):
    return value


def install():
    """Make the device, for this thread and for those that start from now on."""
    cuda, properties = torch.cuda, SimpleNamespace(name="none", total_memory=1 << 37, major=9, minor=0)
    nothing = "_lazy_init set_device set_rng_state set_rng_state_all manual_seed manual_seed_all empty_cache"
    answers = {
        **dict.fromkeys([*nothing.split(), "reset_peak_memory_stats"]),
        **dict.fromkeys(["is_available", "is_initialized", "is_bf16_supported"], True),
        **dict.fromkeys(["current_device", "_get_device_index", "_exchange_device", "_maybe_exchange_device"], 0),
        **dict.fromkeys(["max_memory_allocated", "memory_allocated", "memory_reserved"], 0),
        **{"_is_in_bad_fork": False, "device_count": 1, "memory_stats": {}, "get_device_capability": (9, 0)},
        **{"get_device_name": "none", "get_device_properties": properties},
    }
    for name, answer in answers.items():  # A function each: torch's compiler looks them up.
        setattr(cuda, name, partial(_answer, answer))
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.synchronize = lambda *args: LOG.wait("synchronize")
    cuda.Event, cuda.device, cuda._initialized = _Event, contextlib.nullcontext, True
    cuda.CUDAGraph, cuda.graph = Graph, _capture
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    for kinds in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
        kinds.append(OnCuda)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    run = threading.Thread.run

    def run_on_the_device(self):
        with _Operators(), _Functions():
            run(self)

    threading.Thread.run = run_on_the_device
    _Operators().__enter__()
    _Functions().__enter__()
