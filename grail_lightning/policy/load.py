"""Loading of model and tokenizer from a checkpoint, with checks of what the rest of the package assumes."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from grail_lightning.policy.adapters import add_adapters
from grail_lightning.policy.capabilities import check_packing
from grail_lightning.policy.model import Policy
from grail_lightning.policy.options import (
    LoadedPolicy,
    Loading,
    PolicySource,
    choose_attention,
    first_line,
    read_config,
    resolve_policy,
)
from grail_lightning.policy.tokenizer import load_tokenizer
from grail_lightning.runtime.hub import hub_or_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD_TOLERANCE = 1e-3


def load_policy(
    name: PolicySource, loading: Loading | None = None, *, half_precision: bool = False, trainable: bool = True
) -> Policy:
    """Load model and tokenizer by name or path.

    Args:
        name: A model on the hub, a folder in Hugging Face format, or a packaged policy: `arithmetic`,
            `chains`, `long_chains`, `words`; or a loaded model, which is copied.
        loading: The options; None takes the defaults.
        half_precision: Whether the model will run in half precision (autocast included).
        trainable: Whether the weights are trained. A reference policy is loaded with False, which freezes them.

    Raises:
        ValueError: If the model cannot be loaded, has no decoder stack of the usual form, or applies its head in a way
            that `Policy.head` does not implement; or if packing is on and packed rows would attend to each other.
    """
    from transformers import AutoModelForCausalLM

    if not torch.accelerator.is_available():
        # On CPUs SDPA accepts grouped heads with a mask. Transformers would copy keys and values for each head.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    loading = loading or Loading()
    dtype = loading.dtype if loading.dtype == "auto" else getattr(torch, loading.dtype)
    half_precision = half_precision or dtype in (torch.bfloat16, torch.float16)
    common = {
        "dtype": dtype,
        "attn_implementation": choose_attention(loading, half_precision),
        "trust_remote_code": loading.trust_remote_code,
    }
    if loading.from_scratch:
        config = read_config(name, loading.trust_remote_code)
        common["dtype"] = config.dtype if dtype == "auto" else dtype
        model = AutoModelForCausalLM.from_config(config, **common)
    else:
        model = _copied(name, common) if isinstance(name, LoadedPolicy) else _pretrained(name, common)
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(
            f"`policy` must be a causal language model with decoder blocks, but got {type(model).__name__}. Give "
            "another model."
        )
    policy = Policy(model, load_tokenizer(name, loading.trust_remote_code), loading)
    check_head(policy)
    if loading.packing:
        check_packing(policy)
    if loading.lora is not None:
        add_adapters(model, loading.lora)
    if not trainable:
        policy.requires_grad_(False).eval()
    elif loading.gradient_checkpointing:
        checkpoint_blocks(model)
    return policy


def checkpoint_blocks(model: PreTrainedModel) -> None:
    """Recompute the activations of the decoder's blocks in the backward pass."""
    # The name before Transformers 5.23, which vLLM does not accept yet.
    earlier = "gradient_checkpointing_enable"
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, earlier)
    enable({"use_reentrant": False})


def _copied(source: LoadedPolicy, options: dict[str, Any]) -> PreTrainedModel:
    """A copy of a loaded model, with its own attention unless the options choose one."""
    model = copy.deepcopy(source.model)
    if options["dtype"] != "auto":
        for weight in model.parameters():  # Not the buffers: rotary frequencies stay in float32.
            weight.data = weight.data.to(options["dtype"])
    if options["attn_implementation"] is not None:
        model.set_attn_implementation(options["attn_implementation"])
    return model


def _pretrained(name: str, options: dict[str, Any]) -> PreTrainedModel:
    """The model with its weights, from a folder or from the hub."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    path = resolve_policy(name)
    with nullcontext() if os.path.isdir(path) else hub_or_cache():
        try:
            return AutoModelForCausalLM.from_pretrained(path, **options)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"`policy` {name!r} cannot be loaded: {first_line(error)} Copy or download its weights again."
            ) from error
        except (ValueError, ImportError) as error:
            raise ValueError(f"`policy` {name!r} cannot be loaded: {first_line(error)}") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"`policy` {name!r} cannot be loaded: its weights have other shapes than its config.json says. Give "
                "the config.json that belongs to them."
            ) from error


def check_head(policy: Policy) -> None:
    """Compare `Policy.head` with the model's own logits on four tokens.

    Raises:
        ValueError: If they differ, since the architecture then changes its logits in a way that is not implemented.
    """
    with policy.trial(1, 4) as (ids, mask), policy.eager_attention():
        own = policy.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.float()
        ours = policy.head(policy.hidden(mask, input_ids=ids)).float()
    if (own - ours).abs().max() > _HEAD_TOLERANCE * own.abs().max().clamp(min=1):
        raise ValueError(
            f"{type(policy.model).__name__} changes its logits in a way that `Policy.head` does not know "
            f"(largest difference {(own - ours).abs().max():.3g}). Please report the architecture."
        )


def other_policy(differing: list[str]) -> str:
    """The message about a checkpoint in which some weights have other names or shapes than the policy's."""
    return (
        f"`ckpt_path` must be a checkpoint of this policy, but {len(differing)} of its weights have other names or "
        f"shapes, such as {differing[0]}. Give the `model.policy` and `model.loading.lora` that it was trained with; "
        "they are in the config.yaml of its run."
    )
