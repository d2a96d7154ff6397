"""Scripts and functions in processes of their own, forked from a server that has imported what all of them begin with.

Importing torch, Transformers and Lightning takes a process seconds; the tests that need one would do little else.
"""

import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.vllm_servers import free_port

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        *(
            "grail_lightning.app.cli.app",
            "transformers.models.qwen3.modeling_qwen3",
            "pandas",
            "torch.utils.tensorboard",
        ),
        "tests.runs",
    ]
)


class Printed(NamedTuple):
    """What a process wrote."""

    stdout: str
    stderr: str


def run_script(script, *arguments, ranks=1, timeout=300):
    """What each rank of ``python script arguments`` printed, by rank."""
    written = _run(_program, (str(script), [*map(str, arguments)]), ranks, timeout)
    return [Printed(*(file.decode() for file in files[:2])) for files in written]


def on_ranks(function, *arguments, ranks=2, timeout=300):
    """What ``function(*arguments)`` returns on each rank, by rank; the function must stand at the top of its module."""
    return [pickle.loads(files[2]) for files in _run(_call, (function, arguments), ranks, timeout)]


@contextmanager
def group(ranks=2):
    """The process group of the ranks around it, and the number of this one."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=90))
    try:
        yield rank
    finally:
        torch.distributed.destroy_process_group()


def _run(target, what, ranks, timeout):
    """The contents of what each rank has written: standard output, errors, and a result.

    `torch.distributed` and Lightning find out from the environment who they are.
    """
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder, f"{rank}.{name}") for name in ("out", "err", "result")] for rank in range(ranks)]
        processes = []
        for rank, own in enumerate(files):
            for file in own:
                file.touch()
            names = {"LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0"} if ranks > 1 else {}
            processes.append(_SERVER.Process(target=target, args=(*what, os.environ | meet | names, own)))
        _wait_for(processes, timeout)
        for process, (_, errors, _) in zip(processes, files, strict=True):
            assert process.exitcode == 0, f"{what[0]} ended with {process.exitcode}:\n{errors.read_text()[-3000:]}"
        return [[file.read_bytes() for file in own] for own in files]


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


def _call(function, arguments, environment, files):
    """A function's result, in a file."""
    _begin(["ranks"], environment, files)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    files[2].write_bytes(pickle.dumps(function(*arguments)))


def _module(name, arguments, environment, file):
    """As `python -m name arguments` would, with this environment and all that is printed in a file."""
    os.setsid()
    _begin([name, *arguments], environment, [file, file])
    runpy.run_module(name, run_name="__main__")


def _begin(arguments, environment, files):
    for number, file in enumerate(files[:2], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", "0"))  # Lightning read it when the server imported it.
    sys.argv = arguments
