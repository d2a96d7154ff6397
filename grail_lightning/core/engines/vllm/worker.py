r"""What runs in the processes of vLLM. It imports nothing else of grail-lightning, and needs nothing that vLLM lacks.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \
        --worker-extension-cls grail_lightning.core.engines.vllm.worker.WeightReceiver

The functions take vLLM's worker and use parts of it that are not public. The trainer's probe notices if a later release
no longer does what is expected of them here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn


class WeightReceiver:
    """The methods that ``--worker-extension-cls`` adds to every worker of a vLLM server, called by ``/collective_rpc``.

    Arguments and results are JSON, and weights a safetensors file: nothing is unpickled. A server that was restarted
    has no version and another instance, which is how the trainer notices it.
    """

    grail_instance = f"{os.getpid()}-{time.time_ns()}"
    grail_version: str | None = None
    grail_reports: bool = False

    def grail_status(self) -> dict[str, Any]:
        """The instance of this process, its dtype and room, and the version of its weights: None before a push."""
        config = self.vllm_config.model_config  # type: ignore[attr-defined]  # The worker's.
        return {
            "instance": self.grail_instance,
            "version": self.grail_version,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
        }

    def grail_load(self, path: str, version: str) -> dict[str, Any]:
        """Load the weights of a safetensors file with the names of a checkpoint, unless they are there already.

        The result is `grail_status`; with ``error`` if the file could not be read or its weights do not fit.
        """
        if version == self.grail_version:
            return self.grail_status()
        self.grail_version = None
        try:
            with safe_open(path, framework="pt") as file:  # Opened once: another run may replace it meanwhile.
                written = (file.metadata() or {}).get("version")
                if written != version:
                    raise ValueError(f"{path} holds the weights {written} in place of {version}")
                if not self.grail_reports:
                    report_whole_vocabulary(self)
                    self.grail_reports = True
                take_weights(self, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118 (no dict)
        except Exception as error:  # vLLM raises many types.
            return self.grail_status() | {"error": f"{type(error).__name__}: {error}"}
        self.grail_version = version
        return self.grail_status()


def take_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a worker's model by whole tensors, named as in a checkpoint."""
    # The weights stay ordinary tensors, which can be written into again outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        worker.reload_weights(weights_iterator=iter(weights))
        # On CPUs vLLM keeps a packed copy of a head's weights. `reload_weights` makes it anew only for layers that load
        # weights of their own, so a head that is tied to the embedding would go on with the old ones (seen in 0.32).
        for layer in worker.model_runner.get_model().modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)


def report_whole_vocabulary(worker: Any) -> None:
    """Make the sampler report log-probabilities at the sampling temperature, but before top-k and top-p.

    vLLM's ``raw_logprobs`` are before the temperature; its ``processed_logprobs``, which must be on, after all three.
    """
    sampler = worker.model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):  # vLLM's first model runner.
        sampler.topk_topp_sampler = _BeforeTopKTopP(sampler.topk_topp_sampler)
    elif hasattr(sampler, "_sample_random"):  # Its second one.
        sampler._sample_random = _with_logits_before(sampler._sample_random)
    else:
        raise ValueError(
            f"vLLM's sampler {type(sampler).__qualname__} is not known here. Install a release that the extra "
            "grail-lightning[vllm] names."
        )


class _BeforeTopKTopP(nn.Module):
    """A draw that returns ids ``[n]`` and log-probabilities ``[n, V]``; here those of the logits that it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        if k is None and p is None:
            sampled, logprobs = self.inner(logits, generators, k, p)
            return sampled, logprobs
        logprobs = logits.log_softmax(-1, dtype=torch.float32)  # First, as the draw may write into the logits.
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, logprobs


def _with_logits_before(draw: Any) -> Any:
    """A draw that returns ids and the logits of which log-probabilities are computed; here those that it is given."""

    def drawn(logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        before = logits.clone()  # The draw may write into the logits.
        sampled, _ = draw(logits, *arguments, **named)
        return sampled, before

    return drawn
