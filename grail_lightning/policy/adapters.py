"""Low-rank adapters (peft): how they are added to a model, and merged into its weights again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from grail_lightning.policy.options import LoRA, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def merge_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Merge LoRA adapters into the weights of `model`, in place, and remove them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model
