"""Scripts in processes of their own, forked from a server that has already imported what all of them begin with.

Importing torch, Transformers and Lightning takes a process seconds; the tests that need one would do little else.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.vllm_servers import free_port

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["lightning.pytorch.cli", "transformers.models.qwen3.modeling_qwen3", "pandas", "torch.utils.tensorboard"]
)


class Printed(NamedTuple):
    """What a process wrote."""

    stdout: str
    stderr: str


def run_script(script, *arguments, ranks=1, timeout=300):
    """What each rank printed, by rank; `torch.distributed` and Lightning find out from the environment who they are."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            files = [Path(folder, f"{rank}.{name}") for name in Printed._fields]
            for file in files:
                file.touch()
            names = {"LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0"} if ranks > 1 else {}
            told = (str(script), [*map(str, arguments)], os.environ | meet | names, files)
            processes.append(_SERVER.Process(target=_program, args=told))
        _wait_for(processes, timeout)
        printed = [
            Printed(*(Path(folder, f"{rank}.{name}").read_text() for name in Printed._fields)) for rank in range(ranks)
        ]
        for process, said in zip(processes, printed, strict=True):
            assert process.exitcode == 0, f"{script} ended with {process.exitcode}:\n{said.stderr[-3000:]}"
        return printed


def _wait_for(processes, timeout):
    """All of them, or until one fails: the others would wait for it."""
    for process in processes:
        process.start()
    running, end = list(processes), time.monotonic() + timeout
    try:
        while running and not any(process.exitcode for process in processes) and time.monotonic() < end:
            wait([process.sentinel for process in running], end - time.monotonic())
            running = [process for process in running if process.is_alive()]
    finally:
        for process in running:
            process.kill()
            process.join()


class Forked:
    """What `subprocess.Popen` is for `python -m MODULE ...` with one file for both outputs."""

    def __init__(self, command, *, stdout, env=os.environ, **how):
        _, _, module, *arguments = command
        self._process = _SERVER.Process(target=_module, args=(module, arguments, dict(env), stdout.name), daemon=True)
        self._process.start()

    def wait(self, timeout=None):
        """The exit code."""
        self._process.join(timeout)
        return self._process.exitcode

    def terminate(self):
        self._process.terminate()


def _program(script, arguments, environment, files):
    """As `python script arguments` would, with this environment and what is printed in files."""
    _begin([script, *arguments], environment, files)
    runpy.run_path(script, run_name="__main__")


def _module(name, arguments, environment, file):
    """As `python -m name arguments` would, with this environment and all that is printed in a file."""
    os.setsid()
    _begin([name, *arguments], environment, [file, file])
    runpy.run_module(name, run_name="__main__")


def _begin(arguments, environment, files):
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", "0"))  # Lightning read it when the server imported it.
    sys.argv = arguments
