"""What runs inside a worker of vLLM: taking over new weights, and log-probabilities over the whole vocabulary.

These functions take the worker, as `LLM.collective_rpc` and a worker extension give it, and use parts of vLLM that are
not public. The probe notices if a later release no longer does what is expected of them here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def take_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of the worker's model. The prefix cache has to be emptied afterwards.

    Args:
        worker: The worker.
        weights: Names and whole tensors, as in a checkpoint.
    """
    # The weights stay ordinary tensors, which can be written into again outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        worker.reload_weights(weights_iterator=iter(weights))
        _repack_heads(worker.model_runner.get_model())


def _repack_heads(model: nn.Module) -> None:
    """On CPUs, repack what layers with tied weights multiply with.

    vLLM keeps a packed copy of a head's weights. `reload_weights` makes it anew only for layers that load weights of
    their own, so a head that is tied to the embedding would go on with the old ones (seen in 0.32).
    """
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]


def report_whole_vocabulary(worker: Any) -> None:
    """Make the sampler report log-probabilities at the sampling temperature, but before top-k and top-p.

    Those are what the trainer computes. vLLM's ``raw_logprobs`` are before the temperature, and its
    ``processed_logprobs``, which must be switched on, are renormalised over the tokens that top-k and top-p leave.

    Raises:
        ValueError: If the sampler is built in another way than in the releases of vLLM that are known here.
    """
    sampler = worker.model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        sampler.topk_topp_sampler = _BeforeTopKTopP(sampler.topk_topp_sampler)
    elif hasattr(sampler, "_sample_random"):
        sampler._sample_random = _with_logits_before(sampler._sample_random)
    else:
        raise ValueError(
            f"vLLM's sampler {type(sampler).__qualname__} is not known here. Install a release that the extra "
            "grail-lightning[vllm] names."
        )


class _BeforeTopKTopP(nn.Module):
    """The draw of vLLM's first model runner, with log-probabilities ``[n, V]`` of the logits that it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sampled ids ``[n]`` and the log-probabilities of all tokens ``[n, V]``."""
        if k is None and p is None:
            sampled, found = self.inner(logits, generators, k, p)
            return sampled, found
        found = logits.log_softmax(-1, dtype=torch.float32)  # First, as the draw may write into the logits.
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, found


def _with_logits_before(draw: Any) -> Any:
    """The draw of vLLM's second model runner, which returns the logits that log-probabilities are computed from."""

    def drawn(logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        before = logits.clone()  # The draw may write into the logits.
        sampled, _ = draw(logits, *arguments, **named)
        return sampled, before

    return drawn
