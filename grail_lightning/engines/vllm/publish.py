"""Weights as a safetensors file that servers read: in shared memory, in a folder, or over HTTP.

The file is written one tensor at a time, so that sharded weights are never whole on a rank's device.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ROOM_FOR_A_TENSOR = 512  # Bytes of the header: name, shape and offsets.


def write_safetensors(file: IO[bytes], tensors: Iterable[tuple[str, Tensor]], most: int, dtype: torch.dtype) -> int:
    """Write tensors as they come, with the header at the front of the file; returns the number of bytes.

    Args:
        file: A new file, opened for writing.
        tensors: Floating-point tensors by name, on any device.
        most: Most tensors that will come. The header's room depends on it, since the data follow before it is known.
        dtype: The dtype in which they are written.

    Raises:
        ValueError: If more tensors come, or one is not of floating point.
    """
    room = 8 * (most + 1) * (_ROOM_FOR_A_TENSOR // 8)
    header: dict[str, object] = {}
    offset = 0
    file.seek(8 + room)
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be of floating point, but got {tensor.dtype}. A server cannot take it.")
        whole = tensor.detach().to("cpu", dtype).contiguous()
        size = whole.numel() * whole.element_size()
        file.write(memoryview(whole.reshape(-1).view(torch.uint8).numpy()))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(whole.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    if len(text) > room:
        raise ValueError(f"The header of {len(header)} tensors must have at most {room} bytes, but got {len(text)}.")
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
        address: ``HOST`` or ``HOST:PORT`` under which the servers reach the trainer; None if memory is enough.
    """

    def __init__(self, folder: str | None = None, address: str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._address = address
        self._file: IO[bytes] | None = None
        self._server: http.server.ThreadingHTTPServer | None = None
        self._secret = secrets.token_hex(16)

    def write(self, version: str, tensors: Iterable[tuple[str, Tensor]], most: int, dtype: torch.dtype) -> str:
        """Write new weights; see `write_safetensors`. Returns the source that servers read: a path or a URL."""
        self.close_file()
        name = f"grail-{version}.safetensors"
        if self.folder is not None:
            self._file = open(self.folder / f"{name}.part", "wb")  # noqa: SIM115  (it stays open)
        elif hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create(name), "w+b")
        else:
            self._file = tempfile.NamedTemporaryFile(suffix=f"-{name}")  # noqa: SIM115
        write_safetensors(self._file, tensors, most, dtype)
        if self.folder is not None:
            self._file.close()
            return str(Path(self._file.name).rename(self.folder / name))
        if self._address is None:
            return self._path()
        return self._url(version)

    def close_file(self) -> None:
        """Give up the file; servers that are reading it may go on."""
        file, self._file = self._file, None
        if file is None:
            return
        if self.folder is not None:
            for name in (file.name, file.name.removesuffix(".part")):
                Path(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.close()

    def close(self) -> None:
        """Give up the file, and stop serving it."""
        self.close_file()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def _path(self) -> str:
        assert self._file is not None
        named = isinstance(self._file.name, str)
        return self._file.name if named else f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def _url(self, version: str) -> str:
        """The URL of the file. It holds a secret, so that only those who are told it can read the weights."""
        assert self._address is not None
        host, _, port = self._address.partition(":")
        if self._server is None:
            self._server = _serve(int(port or 0), lambda path: self._path() if path.startswith(self._secret) else None)
        return f"http://{host}:{self._server.server_address[1]}/{self._secret}/{version}"


def local_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # Of a datagram socket: nothing is sent.
        return str(probe.getsockname()[0])


def _serve(port: int, file_of: object) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = file_of(self.path.lstrip("/"))  # type: ignore[operator]
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

    server = http.server.ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
