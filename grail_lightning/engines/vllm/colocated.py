"""vLLM in the process that trains."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.engines.vllm.probe import (
    Bound,
    Gap,
    check_gap,
    default_bound,
    describe_gap,
    dtype_name,
    measure_gap,
    probe_requests,
)
from grail_lightning.engines.vllm.requests import Completion, Request, SeededEngine, sample
from grail_lightning.engines.vllm.start import check_vllm, installed_version, starting
from grail_lightning.engines.vllm.weights import checkpoint_weights, fingerprint, same_on_all_ranks
from grail_lightning.policy import Policy
from grail_lightning.policy.options import first_line
from grail_lightning.runtime.collectives import all_gather_objects, rank, world_size
from grail_lightning.runtime.seeds import preserved
from grail_lightning.tasks.base import Prompt
from grail_lightning.vllm_worker import report_whole_vocabulary, take_weights

T = TypeVar("T")

_CPU_CACHE_GIB = 1.0
_OURS = (
    *("model", "tokenizer", "load_format", "dtype", "logprobs_mode", "distributed_executor_backend"),
    *("enable_sleep_mode", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager"),
)


class VLLMEngine(SeededEngine):
    """vLLM in the process that trains, on the same devices.

    It starts with the first rollouts. The weights are pushed before each sampling if they have changed, one parameter
    at a time, with LoRA adapters merged. At the start and after each push the log-probabilities of a few probe tokens
    are compared with the trainer's, and the run stops if they differ. On GPUs vLLM gives its memory back while the
    policy trains.

    A row's random numbers depend on the seed and on the row's index in the batch. How far the tokens are then the same
    in another batch depends on how vLLM rounds.

    Args:
        gpu_memory_utilization: Share of a GPU's memory that vLLM may take while it samples.
        cache_gib: Memory of the KV cache in GiB; null takes what `gpu_memory_utilization` leaves, and 1 GiB on a CPU.
        max_model_len: Most tokens of a prompt and its response; null takes the model's positions, or what the KV cache
            holds.
        dtype: Dtype in which vLLM computes; auto is that of the trainer's forward pass.
        tensor_parallel_size: Number of ranks that share one copy of the weights in vLLM.
        enforce_eager: Whether to sample without CUDA graphs and compilation; null does so on CPUs alone.
        sleep: Whether vLLM gives back the memory of weights and KV cache while the policy trains. Does not apply to
            CPUs.
        bound: How far the log-probabilities of sampler and trainer may differ on the probe. null is 1e-4 nats on
            average and 1e-3 at most if both compute in float32, else 0.12 and 2.
        options: Further arguments of `vllm.LLM`.

    Raises:
        ValueError: If vLLM is not installed or is another release than this engine knows, or for values out of range.
    """

    own_weights = True

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        cache_gib: float | None = None,
        max_model_len: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        sleep: bool = True,
        bound: Bound | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"`gpu_memory_utilization` must lie in (0, 1], but got {gpu_memory_utilization}.")
        for name, value in (("cache_gib", cache_gib), ("max_model_len", max_model_len)):
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive or null, but got {value}.")
        if tensor_parallel_size < 1:
            raise ValueError(f"`tensor_parallel_size` must be at least 1, but got {tensor_parallel_size}.")
        if taken := sorted(set(options or {}) & set(_OURS)):
            raise ValueError(
                f"`options` must leave out what the engine sets itself, but got {', '.join(taken)}. Use the engine's "
                "own options."
            )
        check_vllm()
        self.gpu_memory_utilization, self.cache_gib = gpu_memory_utilization, cache_gib
        self.max_model_len = max_model_len
        self.dtype, self.tensor_parallel_size, self.enforce_eager = dtype, tensor_parallel_size, enforce_eager
        self.sleep, self.bound, self.options = sleep, bound, dict(options or {})
        self._policy: Policy | None = None
        self._llm: Any = None
        self._sampler_dtype = torch.float32
        self._pushed: Tensor | None = None
        self._asleep = False
        self._told = False

    def update_weights(self, policy: Policy) -> None:
        """Push the weights if they have changed since the last push, and compare log-probabilities.

        Raises:
            ValueError: If vLLM cannot start, or if sampler and trainer do not agree afterwards.
        """
        self._policy, since = policy, "after a push of the weights"
        if self._llm is None:
            self._llm, since = self._start(policy), "at the start"
        now = fingerprint(policy)
        if not self._asleep and same_on_all_ranks(now, self._pushed):
            return
        self._pushed = None  # Should the push fail, the next one is not left out.
        with _apart(policy.device):
            self._push(policy)
            requests = probe_requests(policy)
            completions = self._send(requests)
        self._compare(policy, measure_gap(policy, requests, completions), since)
        self._pushed = now

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`."""
        if self._policy is None:
            raise ValueError("`VLLMEngine` has no weights yet. Call `update_weights(policy)` first.")
        policy = self._policy
        with _apart(policy.device):
            batch = sample(policy, prompts, group_size, sampling, seeds, self._send, self._any_rank)
            if policy.training and self._sleeps(policy.device):
                # In an evaluation the next batch is sampled with the same weights.
                self._llm.sleep(level=2)
                self._asleep = True
        return batch

    def _start(self, policy: Policy) -> Any:
        """A vLLM with the policy's architecture and random weights, which the first push replaces."""
        if world_size() % self.tensor_parallel_size:
            raise ValueError(
                "`engine.tensor_parallel_size` must divide the number of ranks, but got "
                f"{self.tensor_parallel_size} with {world_size()} of them."
            )
        on_cpu = policy.device.type == "cpu"
        of_trainer = torch.float32 if policy.compute_dtype == torch.float64 else policy.compute_dtype
        self._sampler_dtype = of_trainer if self.dtype == "auto" else getattr(torch, self.dtype)
        cache_gib = _CPU_CACHE_GIB if on_cpu and self.cache_gib is None else self.cache_gib
        arguments = {
            "load_format": "dummy",
            "generation_config": "vllm",
            "trust_remote_code": policy.loading.trust_remote_code,
            "dtype": dtype_name(self._sampler_dtype),
            "logprobs_mode": "processed_logprobs",
            "seed": 0,  # Each request has its own.
            "tensor_parallel_size": self.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher",
            "enable_sleep_mode": self._sleeps(policy.device),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
            "max_model_len": self.max_model_len or -1,  # -1: what the model has positions and the cache has memory for.
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
        }
        with starting(policy) as folder, _apart(policy.device):
            try:
                from vllm import LLM

                llm = LLM(model=folder, **arguments | self.options)
            except Exception as error:  # vLLM raises many types.
                raise ValueError(
                    f"`VLLMEngine` cannot start vLLM: {first_line(error)} Where memory is short, change "
                    "`engine.gpu_memory_utilization`, `engine.cache_gib` or `engine.max_model_len`."
                ) from error
        llm.collective_rpc(report_whole_vocabulary)
        return llm

    def _sleeps(self, device: torch.device) -> bool:
        return self.sleep and device.type != "cpu"

    def _push(self, policy: Policy) -> None:
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc(take_weights, args=(checkpoint_weights(policy),))
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        self._llm.reset_prefix_cache()

    def _compare(self, policy: Policy, gap: Gap, since: str) -> None:
        """Check the gap against the bound, and tell it once."""
        bound = self.bound or default_bound(self._sampler_dtype, policy.compute_dtype)
        dtypes = f"sampler in {dtype_name(self._sampler_dtype)}, trainer in {dtype_name(policy.compute_dtype)}"
        check_gap(gap, bound, engine=type(self).__name__, dtypes=dtypes, since=since)
        if self._told:
            return
        self._told = True
        rank_zero_info(f"vLLM {installed_version()} samples. {describe_gap(gap, dtypes)}")

    def _send(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of this rank's requests. Ranks that share weights sample the requests of all of them."""
        from vllm import SamplingParams

        everyone = self._of_group(list(requests))
        rows = [request for part in everyone for request in part]
        room = self._llm.llm_engine.model_config.max_model_len
        for row in rows:
            if (longest := len(row.prompt) + row.parameters["max_tokens"]) > room:
                raise ValueError(
                    f"vLLM has room for {room} tokens of a prompt and its response, but {longest} are asked for. Raise "
                    "`engine.max_model_len` or `engine.cache_gib`, or lower `sampling.max_response_length`."
                )
        parameters = [SamplingParams(**row.parameters, detokenize=bool(row.parameters["stop"])) for row in rows]
        prompts = [{"prompt_token_ids": row.prompt} for row in rows]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False) if rows else []
        place = rank() % self.tensor_parallel_size
        start = sum(len(part) for part in everyone[:place])
        return [_completion(output.outputs[0]) for output in outputs[start : start + len(requests)]]

    def _of_group(self, mine: T) -> list[T]:
        """The values of the ranks that share one copy of the weights in vLLM, in their order."""
        if self.tensor_parallel_size == 1:
            return [mine]
        first = rank() // self.tensor_parallel_size * self.tensor_parallel_size
        return all_gather_objects(mine)[first : first + self.tensor_parallel_size]

    def _any_rank(self, mine: bool) -> bool:
        return mine if self.tensor_parallel_size == 1 else any(all_gather_objects(mine))


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    return Completion(ids, [row[token].logprob for row, token in zip(output.logprobs, ids, strict=True)])


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Without gradients, autocast and inference mode; all random states are as before afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        preserved(device),
    ):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
