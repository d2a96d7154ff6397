"""The language-model head: logits from the decoder's output, and what a backward pass written by hand needs of it.

Shapes: ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grail_lightning.functional.tokens import HeadGradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RULES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Options of a text config that change the logits after the product with the head's weight."""


def apply_head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """``[..., D] -> [..., V]``: the model's logits from its decoder's output."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    scale, divisor, cap = (getattr(config, name, None) for name in _RULES)
    if scale:  # Cohere
        logits = logits * scale
    if divisor:  # Granite
        logits = logits / divisor
    if cap:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def head_gradient(model: PreTrainedModel, *, in_place: bool = False) -> HeadGradient | None:
    """The head's trainable parameters, for a backward pass that is written by hand.

    None if the head draws random numbers, since autograd repeats these draws in the backward pass. With `in_place` the
    backward pass adds the gradient of the head's weight to `weight.grad` itself.
    """
    head: nn.Module = model.get_output_embeddings()
    if any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in head.modules()):
        return None
    trained = [p for p in head.parameters() if p.requires_grad]
    changed = any(getattr(model.config.get_text_config(), name, None) for name in _RULES)
    product = head.weight if type(head) is nn.Linear and getattr(head, "bias", None) is None else None
    return HeadGradient(trained, None if changed else product, in_place)
