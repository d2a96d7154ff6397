"""Low-rank adapters (peft): how they are added to a model, and merged into its weights again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from grail_lightning.policy.options import LoRA

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, lora: LoRA) -> None:
    """Add LoRA adapters to `model`, in place, and freeze all other weights."""
    from peft import LoraConfig

    _check_targets(model, lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    model.add_adapter(config)


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


def _check_targets(model: PreTrainedModel, wanted: str | list[str]) -> None:
    """Check that the layers exist, by peft's rules: a string is a pattern, list items are the ends of names."""
    from transformers.pytorch_utils import Conv1D

    if wanted == "all-linear":
        return
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding, Conv1D))}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    patterns = [wanted] if isinstance(wanted, str) else [rf"(.*\.)?{re.escape(name)}" for name in wanted]
    matches = [{name for name in layers if re.fullmatch(pattern, name)} for pattern in patterns]
    if not matches or not all(matches):  # peft would leave out what it does not find.
        known = sorted({name.rpartition(".")[2] for name, m in layers.items() if not any(m is end for end in ends)})
        raise ValueError(
            f"`loading.lora.target_modules` must name layers of the policy, but got {wanted}. "
            f"It has {', '.join(known)}; or write all-linear."
        )
    targeted = {name for names in matches for name in names if any(layers[name] is end for end in ends)}
    if targeted and ends[0].weight is ends[1].weight:
        raise ValueError(
            f"`loading.lora.target_modules` must leave out what shares its weights with another layer, but got "
            f"{', '.join(sorted(targeted))}: embedding and head of this policy are one, and an export would change "
            "both. Leave it out, or train all weights (`loading.lora: null`)."
        )
