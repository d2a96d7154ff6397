"""Weights as a safetensors file that servers read: in shared memory, in a folder, or over HTTP.

The file is written one tensor at a time, so that sharded weights are never whole on a rank's device.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from grail_lightning.engines.vllm.client import ServerClient
from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_gather_objects

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ROOM_FOR_A_TENSOR = 256  # Bytes of the header: name, shape and offsets.
_MOST_ROOM = 2**26  # safetensors accepts headers of up to 100 MB.


def write_safetensors(
    file: IO[bytes], tensors: Iterable[tuple[str, Tensor]], most: int, dtype: torch.dtype, version: str
) -> int:
    """Write tensors as they come, with the header at the front of the file; returns the number of bytes.

    Args:
        file: A new file, opened for writing.
        tensors: Floating-point tensors by name, on any device.
        most: Most tensors that will come. The header's room depends on it, since the data follow before it is known.
        dtype: The dtype in which the servers compute. Matrices are written in it; vectors, which cost nothing, in
            their own, since some models keep a few of them in float32.
        version: The name of these weights, which the header contains.

    Raises:
        ValueError: If more tensors come than there is room for, or one is not of floating point.
    """
    room = min((most + 4) * _ROOM_FOR_A_TENSOR, _MOST_ROOM)
    header: dict[str, object] = {"__metadata__": {"version": version}}
    offset = 0
    file.seek(8 + room)
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be of floating point, but got {tensor.dtype}. A server cannot take it.")
        whole = tensor.detach().to("cpu", dtype if tensor.ndim > 1 else tensor.dtype).contiguous()
        size = whole.numel() * whole.element_size()
        file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
        header[name] = {
            "dtype": _NAMES[whole.dtype],
            "shape": list(whole.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    if len(text) > room:
        raise ValueError(
            f"The header of {len(header) - 1} tensors must have at most {room} bytes, but got {len(text)}."
        )
    file.seek(0)
    file.write(room.to_bytes(8, "little") + text.ljust(room))
    file.flush()
    return 8 + room + offset


class WeightFile:
    """The newest weights of a trainer, where the servers can read them. Rank 0 has it.

    On one machine it is anonymous memory (`memfd_create`), which a process of the same user opens by
    ``/proc/PID/fd/N``, and which the kernel frees when the trainer ends, however it ends. For servers elsewhere it is
    a file in a folder that both see, or the same memory behind a small HTTP server.

    Args:
        folder: A folder that trainer and servers see under the same path; None for memory.
        address: ``HOST`` or ``HOST:PORT`` under which servers on other machines reach the trainer; None finds it.
    """

    def __init__(self, folder: str | None = None, address: str | None = None) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self._address = address
        self._file: IO[bytes] | None = None
        self._version = ""
        self._server: _Files | None = None
        self._secret = secrets.token_hex(16)

    def write(self, version: str, tensors: Iterable[tuple[str, Tensor]], most: int, dtype: torch.dtype) -> int:
        """Write new weights, see `write_safetensors`, and give up the earlier ones."""
        self.close_file()
        self._version = version
        name = f"grail-{version}.safetensors"
        if self.folder is not None:
            self._file = open(self.folder / name, "wb")  # noqa: SIM115  (it stays open)
        elif hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create(name), "w+b")
        else:
            self._file = tempfile.NamedTemporaryFile(suffix=f"-{name}")  # noqa: SIM115
        return write_safetensors(self._file, tensors, most, dtype, version)

    def source(self, host: str, port: int) -> str:
        """What a server is told to read: a path, or a URL for a server on another machine without a common folder."""
        assert self._file is not None, "`write` comes first"
        if self.folder is not None or is_loopback(host):
            return _path_of(self._file)
        address, _, own_port = (self._address or "").partition(":")
        address = address or local_address(host, port)
        if self._server is None:
            self._server = _serve(int(own_port or 0), self._path_for)
        return f"http://{address}:{self._server.server_address[1]}/{self._secret}/{self._version}"

    def close_file(self) -> None:
        """Give up the file; servers that are reading it may go on."""
        file, self._file = self._file, None
        if file is None:
            return
        if self.folder is not None:
            Path(file.name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.close()

    def close(self) -> None:
        """Give up the file, and stop serving it."""
        self.close_file()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def _path_for(self, requested: str) -> str | None:
        """The file that a URL stands for. It holds a secret: only those who were told it can read the weights."""
        secret, _, version = requested.strip("/").partition("/")
        right, file = secrets.compare_digest(secret.encode(), self._secret.encode()), self._file
        return _path_of(file) if right and version == self._version and file is not None else None


def _path_of(file: IO[bytes]) -> str:
    """The path by which other processes of this machine open a file, which may be memory without a name."""
    return file.name if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"


def most_tensors(policy: Policy) -> int:
    """An upper bound of the number of tensors in a checkpoint, which has the experts of a mixture apart."""
    shapes = [value.shape for value in policy.model.state_dict().values() if isinstance(value, Tensor)]
    return sum(2 * shape[0] if len(shape) > 2 else 1 for shape in shapes)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is that of this machine for itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # Of a datagram socket: nothing is sent.
        found = str(probe.getsockname()[0])
    return f"[{found}]" if family == socket.AF_INET6 else found


class _Files(http.server.ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the server that broke off asks again, or says why it cannot."""


def _serve(port: int, path_for: Callable[[str], str | None]) -> _Files:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = path_for(self.path)
            if path is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            with open(path, "rb") as file:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                shutil.copyfileobj(file, self.wfile, 2**20)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _Files(("", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def check_places(clients: Sequence[ServerClient]) -> None:
    """Check that every rank means the same servers. A collective.

    Raises:
        ValueError: If ranks are on several machines and a server is named by the loopback address.
    """
    hosts = set(all_gather_objects(socket.gethostname()))
    local = [client.url for client in clients if is_loopback(client.host)]
    if len(hosts) > 1 and local:
        raise ValueError(
            f"`urls` must name servers as every machine of the trainer reaches them, but got {local[0]}, with ranks on "
            f"{', '.join(sorted(hosts))}. Write the name of the server's machine."
        )
