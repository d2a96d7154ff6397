"""Starting vLLM in this process: its folder, and the environment that it reads and writes."""

from __future__ import annotations

import copy
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import rank, world_size

_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # It warns at every push of tied weights.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # The trainer's threads would be bound with its own.
}
_WRITTEN_BY_VLLM = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE")


@contextmanager
def starting(policy: Policy) -> Iterator[str]:
    """A folder with the policy's config and tokenizer, without weights, in an environment in which vLLM can start.

    vLLM finds its rank there as `torchrun` would have told it. Afterwards the folder is gone, and what was changed for
    the sake of the start alone is as before.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.distributed.is_initialized():
        # vLLM makes a process group of this one rank, and Lightning then recommends to synchronise what is logged.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
    ranks = _ranks(policy.device)
    before = {name: os.environ.get(name) for name in (*ranks, *_WRITTEN_BY_VLLM)}
    os.environ.update(ranks)
    set_num_threads = torch.set_num_threads
    try:
        with tempfile.TemporaryDirectory(prefix="grail-lightning-vllm-") as folder:
            config = copy.deepcopy(policy.model.config)
            config.architectures = [type(policy.model).__name__]
            config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Its imports warn of deprecations in torch.
                yield folder
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces it on CPUs.
        for name, earlier in before.items():
            if earlier is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = earlier


def _ranks(device: torch.device) -> dict[str, str]:
    found = {
        "RANK": str(rank()),
        "WORLD_SIZE": str(world_size()),
        "LOCAL_RANK": str(device.index or 0) if device.type == "cuda" else os.environ.get("LOCAL_RANK", str(rank())),
    }
    if torch.distributed.is_initialized():
        return found
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
