"""vLLM in the process that trains."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from grail_lightning.core.engines.base import RolloutEngine, TurnSampler
from grail_lightning.core.engines.requests import Completion, Request, row_seeds, sample, sample_turns
from grail_lightning.core.engines.vllm.probe import Bound, check_probe, dtype_name, probe_requests
from grail_lightning.core.engines.vllm.weights import checkpoint_weights, fingerprint, same_on_all_ranks
from grail_lightning.core.engines.vllm.worker import report_whole_vocabulary, take_weights
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import first_line
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import SampledBatch, Sampling
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.collectives import all_gather_objects, rank, world_size

_CPU_CACHE_BYTES = 2**30
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # It warns at every push of tied weights.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # The trainer's threads would be bound with its own.
}
_WRITTEN_BY_VLLM = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE")


class VLLMEngine(RolloutEngine):
    """vLLM in the process that trains, on the same devices.

    It starts with the first rollouts. The weights are pushed before each sampling if they have changed, one parameter
    at a time, with LoRA adapters merged. After each push the log-probabilities of a few probe tokens are compared with
    the trainer's, and the run stops if they differ. On GPUs vLLM gives its memory back while the policy trains.

    Args:
        gpu_memory_utilization: Share of a GPU's memory that vLLM may take while it samples.
        max_model_len: Most tokens of a prompt and its response; null takes the model's positions, or what the KV cache
            holds.
        dtype: Dtype in which vLLM computes; auto is that of the trainer's forward pass.
        tensor_parallel_size: Number of ranks that share one copy of the weights in vLLM.
        sleep: Whether vLLM gives back the memory of weights and KV cache while the policy trains. Does not apply to
            CPUs.
        bound: How far the log-probabilities of sampler and trainer may differ on the probe. null is 1e-4 nats on
            average and 1e-3 at most if both compute in float32, else 0.12 and 2.
        options: Further arguments of `vllm.LLM`, which replace those that the engine sets itself.
    """

    copies_weights = True

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        max_model_len: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        tensor_parallel_size: int = 1,
        sleep: bool = True,
        bound: Bound | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_option("gpu_memory_utilization", gpu_memory_utilization, "(0, 1]")
        check_option("tensor_parallel_size", tensor_parallel_size, "[1, inf)")
        if max_model_len is not None:
            check_option("max_model_len", max_model_len, "[1, inf)")
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "`VLLMEngine` needs vLLM, which is not installed. Install it: pip install 'grail-lightning[vllm]'. Or "
                "sample with `HFEngine`."
            )
        self.gpu_memory_utilization, self.max_model_len = gpu_memory_utilization, max_model_len
        self.dtype, self.tensor_parallel_size = dtype, tensor_parallel_size
        self.sleep, self.bound, self.options = sleep, bound, dict(options or {})
        self._policy: Policy | None = None
        self._llm: Any = None
        self._prints: Tensor | None = None
        self._asleep = False

    @property
    def room(self) -> int | None:
        """See `RolloutEngine.room`. What the KV cache holds is known once vLLM has started."""
        return self.max_model_len if self._llm is None else int(self._llm.llm_engine.model_config.max_model_len)

    def update_weights(self, policy: Policy) -> None:
        """Push the weights if they have changed since the last push, and compare log-probabilities."""
        self._policy, first = policy, self._llm is None
        if first:
            self._llm = self._start(policy)
        prints = fingerprint(policy)
        if not self._asleep and same_on_all_ranks(prints, self._prints):
            return
        self._prints = None  # Should the push fail, the next one is not left out.
        with _undisturbed(policy.device):
            self._push(policy)
            requests = probe_requests(policy)
            completions = self._send(requests)
        agreement = check_probe(
            policy,
            requests,
            completions,
            engine=type(self).__name__,
            dtype=self._sampler_dtype(policy),
            bound=self.bound,
            since="at the start" if first else "after a push of the weights",
        )
        if first:
            rank_zero_info(f"vLLM samples in this process. {agreement}")
        self._prints = prints

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """See `RolloutEngine.generate`."""
        return self.generate_seeded(prompts, group_size, sampling, row_seeds(seed, len(prompts) * group_size))

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`."""
        with self._awake() as policy, _undisturbed(policy.device):
            return sample(policy, prompts, group_size, sampling, seeds, self._send)

    @contextmanager
    def turns(self, sampling: Sampling) -> Iterator[TurnSampler]:
        """See `RolloutEngine.turns`. vLLM gives its memory back after the last turn."""
        with self._awake() as policy:
            yield partial(sample_turns, policy, sampling, _undisturbed(policy.device)(self._send))

    @contextmanager
    def _awake(self) -> Iterator[Policy]:
        """The policy whose weights vLLM has. Afterwards it sleeps if the policy trains."""
        if self._policy is None:
            raise ValueError("`VLLMEngine` has no weights yet. Call `update_weights(policy)` first.")
        policy = self._policy
        yield policy
        # In an evaluation the next batch is sampled with the same weights.
        if policy.training and self._sleeps(policy.device):
            with _undisturbed(policy.device):
                self._llm.sleep(level=2)
            self._asleep = True

    def _start(self, policy: Policy) -> Any:
        """A vLLM with random weights, which the first push replaces."""
        if world_size() % self.tensor_parallel_size:
            raise ValueError(
                "`engine.tensor_parallel_size` must divide the number of ranks, but got "
                f"{self.tensor_parallel_size} with {world_size()} of them."
            )
        on_cpu = policy.device.type == "cpu"
        arguments = {
            "load_format": "dummy",
            "generation_config": "vllm",
            "trust_remote_code": policy.loading.trust_remote_code,
            "dtype": dtype_name(self._sampler_dtype(policy)),
            "logprobs_mode": "processed_logprobs",
            "seed": 0,  # Each request has its own.
            "tensor_parallel_size": self.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher",
            "enable_sleep_mode": self._sleeps(policy.device),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": _CPU_CACHE_BYTES if on_cpu else None,
            "max_model_len": self.max_model_len or -1,  # -1: what the model has positions and the cache has memory for.
            "enforce_eager": on_cpu,
        }
        if on_cpu:  # Where vLLM 0.32 cuts a prompt, it ends with "CPU Generator does not use offset".
            arguments["enable_chunked_prefill"] = False
        with _starting(policy) as folder, _undisturbed(policy.device):
            try:
                from vllm import LLM

                llm = LLM(model=folder, **(arguments | self.options))
            except Exception as error:  # vLLM raises many types.
                raise ValueError(
                    f"`VLLMEngine` cannot start vLLM: {first_line(error)} Where memory is short, change "
                    "`engine.gpu_memory_utilization` or `engine.max_model_len`."
                ) from error
        llm.collective_rpc(report_whole_vocabulary)
        return llm

    def _sampler_dtype(self, policy: Policy) -> torch.dtype:
        of_trainer = torch.float32 if policy.compute_dtype == torch.float64 else policy.compute_dtype
        return of_trainer if self.dtype == "auto" else getattr(torch, self.dtype)

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

    def _send(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of this rank's requests. Ranks that share weights sample the requests of all of them."""
        from vllm import SamplingParams

        everyone, place = [list(requests)], rank() % self.tensor_parallel_size
        if self.tensor_parallel_size > 1:
            everyone = all_gather_objects(list(requests))[rank() - place :][: self.tensor_parallel_size]
        rows = [request for part in everyone for request in part]
        room = self.room or 0
        longest = max((len(row.prompt) + row.parameters["max_tokens"] for row in rows), default=0)
        if longest > room:
            raise ValueError(
                f"vLLM has room for {room} tokens of a prompt and its response, but {longest} are asked for. Raise "
                "`engine.max_model_len`, or lower `sampling.max_response_length`."
            )
        parameters = [SamplingParams(**row.parameters, detokenize=bool(row.parameters["stop"])) for row in rows]
        prompts = [{"prompt_token_ids": row.prompt} for row in rows]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False) if rows else []
        start = sum(len(part) for part in everyone[:place])
        return [_completion(output.outputs[0]) for output in outputs[start : start + len(requests)]]


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    if (count := len(output.logprobs or ())) != len(ids):
        raise ValueError(
            f"vLLM must report the log-probability of each token, but gave {count} for the {len(ids)} of a response. "
            "Take what leaves them out of `engine.options`."
        )
    reported = [row.get(token) if row else None for row, token in zip(output.logprobs, ids, strict=True)]
    logprobs = [math.nan if entry is None or entry.logprob is None else float(entry.logprob) for entry in reported]
    return Completion(ids, logprobs, str(output.finish_reason))


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Without gradients, autocast and inference mode, and without a trace in the random states."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        isolate_rng(include_cuda=device.type == "cuda"),
    ):
        yield


@contextmanager
def _starting(policy: Policy) -> Iterator[str]:
    """A folder with the policy's config and tokenizer, in an environment that tells vLLM its rank as `torchrun` would.

    Afterwards both are as before.
    """
    os.environ.update({name: value for name, value in _DEFAULTS.items() if name not in os.environ})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ranks = {
        "RANK": str(rank()),
        "WORLD_SIZE": str(world_size()),
        "LOCAL_RANK": str(policy.device.index or 0)
        if policy.device.type == "cuda"
        else os.environ.get("LOCAL_RANK", str(rank())),
    }
    if not torch.distributed.is_initialized():
        # vLLM makes a process group of this one rank, and Lightning then recommends to synchronise what is logged.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    before = {name: os.environ.get(name) for name in (*ranks, *_WRITTEN_BY_VLLM)}
    os.environ.update(ranks)
    set_num_threads = torch.set_num_threads
    try:
        with tempfile.TemporaryDirectory(prefix="grail-lightning-vllm-") as folder, warnings.catch_warnings():
            config = copy.deepcopy(policy.model.config)
            config.architectures = [type(policy.model).__name__]
            config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            warnings.simplefilter("ignore")  # Its imports warn of deprecations in torch.
            yield folder
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces it on CPUs.
        for name, earlier in before.items():
            if earlier is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = earlier
