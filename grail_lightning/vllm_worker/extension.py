"""The worker extension with which a vLLM server takes new weights from a trainer.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls grail_lightning.vllm_worker.WeightReceiver

The methods are called by name through the route ``/collective_rpc``. Their arguments and results are JSON, and weights
come as a safetensors file: a path that this machine can read, or a URL of the trainer. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grail_lightning.vllm_worker.model import report_whole_vocabulary, take_weights

PROTOCOL = 1
"""Trainer and server must agree on it; it changes with the methods below."""
_FETCH_SECONDS = 60.0
_VERSION = re.compile(r"[0-9a-z-]{1,80}")


class WeightReceiver:
    """The methods that ``--worker-extension-cls`` adds to every worker of a vLLM server.

    New weights count only when the trainer has confirmed them: between loading and confirming it empties the prefix
    cache. A server that was restarted has no version and another instance, which is how the trainer notices it.
    """

    grail_version: str | None = None
    grail_loaded: str | None = None
    grail_instance: str | None = None
    grail_broken: str | None = None
    grail_reports: bool = False

    def grail_status(self) -> dict[str, Any]:
        """The version of the weights, the instance of this process, and figures that a trainer compares with its own.

        ``version`` is None for the weights with which the server was started. ``broken`` says why a load has failed
        half-way; the server must then be started again.
        """
        if self.grail_instance is None:
            self.grail_instance = f"{os.getpid()}-{time.time_ns()}"
        config: Any = self.vllm_config.model_config  # type: ignore[attr-defined]  # The worker's.
        text = config.hf_text_config
        return {
            "protocol": PROTOCOL,
            "instance": self.grail_instance,
            "version": self.grail_version,
            "broken": self.grail_broken,
            "model": str(config.model),
            "vocab_size": int(text.vocab_size),
            "hidden_size": int(text.hidden_size),
            "num_hidden_layers": int(text.num_hidden_layers),
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "max_model_len": int(config.max_model_len),
        }

    def grail_load(self, source: str, version: str) -> dict[str, Any]:
        """Load the weights of a safetensors file, under the names of the Hugging Face checkpoint.

        They have a version when `grail_confirm` is called. Weights that are there already are not loaded again.

        Args:
            source: A path, or a URL of http or https.
            version: The name of these weights: digits, small letters and hyphens.

        Returns:
            `grail_status`; with ``error`` if the file could not be read or its weights do not fit.
        """
        if version in (self.grail_version, self.grail_loaded) or self.grail_broken:
            return self.grail_status()
        self.grail_version = self.grail_loaded = None
        try:
            path = _fetch(source, version) if source.startswith(("http://", "https://")) else Path(source)
            with safe_open(path, framework="pt") as file:  # Before the model is touched: the header is complete.
                names, found = list(file.keys()), (file.metadata() or {}).get("version")
                if found != version:
                    raise ValueError(f"it holds the weights {found} in place of {version}")
        except Exception as error:
            return self.grail_status() | {"error": f"{source} cannot be read: {type(error).__name__}: {error}"}
        try:
            if not self.grail_reports:
                report_whole_vocabulary(self)
                self.grail_reports = True
            take_weights(self, _tensors(path, names))
        except Exception as error:
            self.grail_broken = f"{type(error).__name__}: {error}"
            return self.grail_status() | {"error": self.grail_broken}
        self.grail_loaded = version
        return self.grail_status()

    def grail_confirm(self, version: str) -> dict[str, Any]:
        """Give the loaded weights their version, after which prompts may be sent."""
        if version == self.grail_loaded:
            self.grail_version, self.grail_loaded = version, None
        _remove_fetched(version)
        return self.grail_status()


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in names:
            yield name, file.get_tensor(name)


def _folder() -> Path:
    shared = Path("/dev/shm")  # noqa: S108  (memory, which the workers of one server share)
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _name(version: str) -> str:
    """The name of a fetched file. The workers of one server have one parent process."""
    return f"grail-weights-{os.getppid()}-{version}"


def _fetch(url: str, version: str) -> Path:
    """The file behind a URL, which one worker of the server fetches and all of them read.

    Raises:
        ValueError: If the version cannot be a file's name.
        OSError: If the file cannot be fetched completely.
    """
    if not _VERSION.fullmatch(version):
        raise ValueError(f"`version` must be digits, small letters and hyphens, but got {version!r}.")
    _remove_orphans()
    path = _folder() / _name(version)
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_name(f"{path.name}.part")
            # Trainers are inside the cluster; a proxy is not asked for them.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=_FETCH_SECONDS) as answer, open(part, "wb") as file:
                shutil.copyfileobj(answer, file, 2**20)
                expected = int(answer.headers["Content-Length"])
            if (got := part.stat().st_size) != expected:
                part.unlink()
                raise OSError(f"only {got} of {expected} bytes arrived")
            part.rename(path)
    return path


def _remove_fetched(version: str) -> None:
    for file in _folder().glob(f"{_name(version)}*") if _VERSION.fullmatch(version) else ():
        file.unlink(missing_ok=True)


def _remove_orphans() -> None:
    """Remove files of servers that have been killed."""
    for file in _folder().glob("grail-weights-*"):
        parent = file.name.split("-")[2]
        if parent.isdigit() and not Path("/proc", parent).exists():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
