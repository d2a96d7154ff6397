"""The sizes of a policy: its config, its parameters and its optimiser's state, without weights."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from grail_lightning.plan.live import Live
from grail_lightning.plan.published import CONFIGS
from grail_lightning.plan.settings import Settings
from grail_lightning.policy import Policy, load_tokenizer
from grail_lightning.policy.adapters import add_adapters
from grail_lightning.policy.load import checkpoint_blocks
from grail_lightning.policy.options import read_config, resolve_policy
from grail_lightning.policy.trees import TREE_ATTENTION

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Numbers of parameters and their bytes.

    Attributes:
        parameters: All parameters; adapters included, tied weights once.
        trainable: Those that are trained.
        weight_bytes: Bytes of all parameters.
        trainable_bytes: Bytes of the trained ones.
        half: Trained parameters in half precision, which get master weights.
        largest: The largest trained tensor, in parameters.
        linear: Weights of linear layers, the head included, which autocast casts.
        blocks: The number of decoder blocks.
        block_bytes: Bytes of one block's parameters.
        vocabulary: Rows of the head.
        hidden: Columns of the head: the width of the decoder.
        head_element: Bytes of an element of its weight.
        tied: Whether head and embeddings are one tensor.
        head_trained: Whether the head is trained.
        heads: The number of attention heads times their width.
        sdpa: Whether SDPA computes attention, as prefix trees require.
    """

    parameters: int
    trainable: int
    weight_bytes: int
    trainable_bytes: int
    half: int
    largest: int
    linear: int
    blocks: int
    block_bytes: int
    vocabulary: int
    hidden: int
    head_element: int
    tied: bool
    head_trained: bool
    heads: int
    sdpa: bool


def model_config(settings: Settings, given: str | None = None) -> tuple[Any, str]:
    """The model's config, and where it comes from.

    Args:
        settings: The settings, whose policy is looked up unless `given`.
        given: A `config.json`, or a folder that contains one.

    Raises:
        ValueError: If there is none.
    """
    from transformers import AutoConfig

    if given is not None:
        file = Path(given).expanduser()
        file = file / "config.json" if file.is_dir() else file
        return _config_of_file(file), str(file)
    name = settings.policy
    if name in CONFIGS:
        values = dict(CONFIGS[name])
        return AutoConfig.for_model(values.pop("model_type"), **values), "built in"
    found = resolve_policy(name)
    try:
        return read_config(name, settings.loading.trust_remote_code), found
    except ValueError as error:
        raise ValueError(f"{error} Here its config.json is enough: give it by `--model_config`.") from error


def _config_of_file(file: Path) -> Any:
    from transformers import AutoConfig

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`--model_config` must be a model's config.json or a folder with one, but {file} cannot be read: "
            f"{' '.join(str(error).split())}."
        ) from error


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """Inside the context tensors have sizes, but no data. Operations allocate nothing."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # It prints the errors that it raises.
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        log.disabled = before


def build(config: PreTrainedConfig, settings: Settings, *, blocks: int | None = None) -> Policy:
    """The policy in training mode on the meta device.

    Args:
        config: The model's config.
        settings: The options with which it is loaded.
        blocks: The number of decoder blocks; None takes the config's.
    """
    from transformers import AutoModelForCausalLM

    if blocks is not None:
        config = copy.deepcopy(config)
        text = config.get_text_config()
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:blocks]
        text.num_hidden_layers = blocks
    dtype = settings.weight_dtype(config.dtype or torch.float32)
    wanted = settings.loading.attention
    attention = {"auto": None, "eager": "eager"}.get(wanted, "sdpa")  # Flash-attn is planned as SDPA without a mask.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        # The tokenizer gives ids of special tokens alone. The packaged one stands in, since it is always there.
        policy = Policy(model, load_tokenizer("arithmetic"), settings.loading)
        if settings.loading.lora is not None:
            add_adapters(model, settings.loading.lora)
            for parameter in policy.parameters():
                if parameter.requires_grad:  # On real devices peft takes the dtype of the layers.
                    parameter.data = parameter.data.to(dtype)
    if settings.loading.gradient_checkpointing:
        checkpoint_blocks(model)
    return policy.train()


def give_sizes(policy: Policy) -> Policy:
    """The same policy, with tensors without data in place of those on the meta device, which autocast ignores."""
    made: dict[int, Tensor] = {}  # Tied weights remain one tensor.
    for module in policy.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None:
                continue
            if id(old) not in made:
                new = torch.empty(old.shape, dtype=old.dtype)
                made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(module, name, made[id(old)])
    return policy


def count(policy: Policy) -> Shapes:
    """The numbers of parameters of a policy, on any device."""
    everything = list(policy.parameters())
    trained = [p for p in everything if p.requires_grad]
    head, embeddings = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    weight = head.weight
    linear = {id(m.weight): m.weight.numel() for m in policy.modules() if isinstance(m, nn.Linear)}
    text = policy.model.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shapes(
        parameters=_numel(everything),
        trainable=_numel(trained),
        weight_bytes=_bytes(everything),
        trainable_bytes=_bytes(trained),
        half=_numel([p for p in trained if p.element_size() == 2]),
        largest=max((p.numel() for p in trained), default=0),
        linear=sum(linear.values()),
        blocks=len(policy.blocks),
        block_bytes=_bytes(list(policy.blocks[0].parameters())),
        vocabulary=weight.shape[0],
        hidden=weight.shape[1],
        head_element=weight.element_size(),
        tied=weight is embeddings.weight,
        head_trained=weight.requires_grad,
        heads=text.num_attention_heads * size,
        sdpa=policy.model.config._attn_implementation == TREE_ATTENTION,
    )


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# Bytes of state for each parameter, of optimisers that run on real tensors alone: two moments and their scales.
QUANTISED = {"AdamW8bit": 2.1, "Adam8bit": 2.1, "AdamW4bit": 1.1, "Adam4bit": 1.1, "AdamWFp8": 2.1, "AdamFp8": 2.1}


def optimizer_bytes(policy: Policy, settings: Settings) -> tuple[int, int]:
    """Bytes of the optimiser's state, and of what a step of it allocates besides.

    A step is taken on tensors without data, in float32 if there are master weights.

    Args:
        policy: The policy on the meta device.
        settings: The settings with the optimiser.

    Raises:
        ValueError: If the optimiser cannot take such a step and its state is not known.
    """
    masters = settings.loading.master_weights and settings.strategy != "fsdp2"
    trained = [p for p in policy.parameters() if p.requires_grad]
    name = settings.optimizer_name.rpartition(".")[2]
    if (known := QUANTISED.get(name)) is not None:
        return round(known * _numel(trained)), 0
    sizes = [(p.shape, torch.float32 if masters and p.element_size() == 2 else p.dtype) for p in trained]
    try:
        return _taken(settings.optimizer, sizes, on_gpu=settings.device == "cuda")
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"`model.optimizer` {settings.optimizer_name} cannot be planned: its step needs tensors with data "
            f"({str(error).splitlines()[0]}). Plan with torch.optim.AdamW in its place."
        ) from error


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads 1 from tensors without data. Optimisers read numbers that change no sizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it reads a number."""
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def _taken(make: Callable[[Any], Any], sizes: list[Any], *, on_gpu: bool) -> tuple[int, int]:
    """The state after a step, and what the step allocates besides."""
    with without_data():
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in sizes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make(iter(parameters))
        for group in optimizer.param_groups:
            # Torch's default is one operation over all tensors on GPUs, and one tensor after the other on CPUs.
            if on_gpu and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        with Live() as live, _Ones():  # type: ignore[no-untyped-call]
            optimizer.step()
        states = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        state = _bytes([v for v in states if v.dim() or v.numel() > 1])
        return state, max(0, live.peak - live.now)
