"""Loading of model and tokenizer from a checkpoint, with checks of what the rest of the package assumes."""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grail_lightning.core.policy.capabilities import check_packing, check_padding
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import (
    LoadedPolicy,
    Loading,
    LoRA,
    PolicySource,
    first_line,
    load_tokenizer,
    read_config,
    reading,
)
from grail_lightning.core.policy.vision import PictureTokens, load_pictures, placed, takes_pictures, vision_parameters
from grail_lightning.core.records.picture import Picture
from grail_lightning.core.runtime.seeds import derive_seed, run_seed, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD_TOLERANCE = 1e-3


def load_policy(
    name: PolicySource,
    loading: Loading | None = None,
    *,
    half_precision: bool = False,
    trainable: bool = True,
    pictures: PictureTokens | None = None,
) -> Policy:
    """Load model and tokenizer by name or path.

    Args:
        name: A model on the hub, a folder in Hugging Face format, or a packaged policy: `arithmetic`,
            `chains`, `long_chains`, `numbers`, `words`, `search`, `code`, `charts`; or a loaded model, which is copied.
        loading: The options; None takes the defaults.
        half_precision: Whether the model will run in half precision (autocast included).
        trainable: Whether the weights are trained. A reference policy is loaded with False, which freezes them.
        pictures: The picture tokens of another policy of the run; by default those of the policy's own processor.
    """
    if not torch.accelerator.is_available():
        # On CPUs SDPA accepts grouped heads with a mask. Transformers would copy keys and values for each head.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    loading = loading or Loading()
    model = _load_model(name, loading, half_precision)
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(f"`policy` must be a model with decoder blocks, but got {type(model).__name__}.")
    tokenizer = load_tokenizer(name, loading.trust_remote_code)
    if pictures is None or not takes_pictures(name, loading.trust_remote_code):
        pictures = load_pictures(name, tokenizer, loading.trust_remote_code)
    policy_loading = loading if trainable else replace(loading, train_vision=False)
    policy = Policy(model, tokenizer, policy_loading, pictures)
    check_head(policy)
    check_padding(policy)
    if policy.vision is not None:
        check_vision(policy, policy.vision.pictures)
    if loading.packing:
        check_packing(policy)
    if loading.lora is not None:
        unseen = [] if loading.train_vision or policy.vision is None else vision_parameters(model)
        add_adapters(model, loading.lora, leave_out=sorted({name.rpartition(".")[0] for name, _ in unseen}))
    if not trainable:
        policy.requires_grad_(False).eval()
    elif loading.gradient_checkpointing:
        # The name before Transformers 5.23, which vLLM does not accept yet.
        earlier = "gradient_checkpointing_enable"
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, earlier)
        enable({"use_reentrant": False})
    return policy


def _load_model(name: PolicySource, loading: Loading, half_precision: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = takes_pictures(name, loading.trust_remote_code)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    dtype: Any = loading.dtype if loading.dtype == "auto" else getattr(torch, loading.dtype)
    half = half_precision or dtype in (torch.bfloat16, torch.float16)
    has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    attention: str | None = loading.attention
    if attention == "auto":  # None is SDPA, or eager for an architecture without it (Gemma 2).
        attention = "flash_attention_2" if loading.packing and half and has_flash else None
    options = {"attn_implementation": attention, "trust_remote_code": loading.trust_remote_code}
    if loading.from_scratch:
        config = read_config(name, loading.trust_remote_code)
        dtype = config.dtype if dtype == "auto" else dtype
        with seeded(torch.get_default_device(), derive_seed(run_seed(), "weights")):  # The reference has the same.
            return auto.from_config(config, dtype=dtype, **options)
    if not isinstance(name, LoadedPolicy):
        with reading(name) as path:
            return auto.from_pretrained(path, dtype=dtype, **options)
    model = copy.deepcopy(name.model)
    if dtype != "auto":
        for weight in model.parameters():  # Not the buffers: rotary frequencies stay in float32.
            weight.data = weight.data.to(dtype)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def check_head(policy: Policy) -> None:
    """Compare `Policy.head` with the model's own logits on four tokens."""
    with policy.trial(1, 4) as (ids, mask), policy.eager_attention():
        logits = policy.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.float()
        ours = policy.head(policy.hidden(mask, ids)).float()
    if (logits - ours).abs().max() > _HEAD_TOLERANCE * logits.abs().max().clamp(min=1):
        raise ValueError(
            f"{type(policy.model).__name__} changes its logits in a way that `Policy.head` does not know "
            f"(largest difference {(logits - ours).abs().max():.3g}). Please report the architecture."
        )


def check_vision(policy: Policy, pictures: PictureTokens) -> None:
    """Compare a prompt with a picture as the policy runs it with the model's own way, from the pixels."""
    from PIL import Image

    model, picture = policy.model, Picture(Image.linear_gradient("L").resize((96, 64)), "A picture that is tried")
    try:
        # Lightning loads inside a context of its device, but what the processor makes is on the CPU.
        with torch.device("cpu"), policy.trial(1, 1), policy.eager_attention():
            text = f"{pictures.place}{policy.tokenizer.decode([0, 1, 2])}"
            encoding = dict(pictures.processor(text=[text], images=[[picture.open()]], return_tensors="pt"))
            ids = torch.tensor([pictures.name(encoding["input_ids"][0].tolist(), [picture])], device=policy.device)
            inputs = placed({name: value for name, value in encoding.items() if name != "attention_mask"}, model)
            mask = torch.ones_like(ids, dtype=torch.bool)
            expected = model(**inputs, attention_mask=mask.long(), use_cache=False).logits.float()
            logits = policy.head(policy.hidden(mask, ids)).float()
        difference = float((expected - logits).abs().max() / expected.abs().max().clamp(min=1))
        reason = f"its logits behind a picture differ by {difference:.3g}" if difference > _HEAD_TOLERANCE else None
    except (ValueError, TypeError, AttributeError, RuntimeError, LookupError, AssertionError) as error:
        reason = first_line(error)
    if reason is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be a policy that takes pictures: {reason}. Its pictures are more than "
            "input embeddings, such as those of Idefics3, LLaVA and Qwen2.5-VL are. Give another model."
        )


def other_policy(differing: list[str]) -> str:
    """The message about a checkpoint in which some weights have other names or shapes than the policy's."""
    return (
        f"`ckpt_path` must be a checkpoint of this policy, but {len(differing)} of its weights have other names or "
        f"shapes, such as {differing[0]}. Give the `model.policy` and `model.loading.lora` that it was trained with; "
        "they are in the config.yaml of its run."
    )


def add_adapters(model: PreTrainedModel, lora: LoRA, *, leave_out: Sequence[str] = ()) -> None:
    """Add LoRA adapters to `model`, in place, and freeze all other weights; the modules `leave_out` get none."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        raise ValueError(
            f"`loading.lora` cannot be used: {first_line(error)}. If there is none, take an earlier Transformers."
        ) from error
    wanted, option = lora.target_modules, "`loading.lora.target_modules` must"
    if isinstance(wanted, str) and wanted.isidentifier():  # peft takes a text for a regular expression of whole names.
        wanted = [wanted]
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight is not embedding]
    layers = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=wanted,
        exclude_modules=list(leave_out) or None,
        task_type="CAUSAL_LM",
    )
    unknown = f"{option} name layers of the policy, but got {wanted}: %s It has {layers}; or write all-linear."
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # Of tied layers, which are refused below.
            model.add_adapter(config)
    except ValueError as error:  # If it finds none of them.
        raise ValueError(unknown % first_line(error)) from error
    adapted = [f".{name}" for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    # peft leaves out the names of a list that it does not find.
    missing = [name for name in wanted if not any(a.endswith(f".{name}") for a in adapted)]
    if isinstance(wanted, list) and missing:
        raise ValueError(unknown % f"it has no {', '.join(missing)}.")
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ValueError(
            f"{option} leave out what shares its weights with another layer, but got {wanted}: embedding and head of "
            "this policy are one, and an export would change both. Leave them out, or train all weights "
            "(`loading.lora: null`)."
        )
