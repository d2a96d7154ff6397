"""Sandboxes of this machine: a warm interpreter that is isolated, and forks one confined child for each program.

The kernel holds a program in three ways: by what the warm interpreter can see, which its isolation decides
(programs/isolation.py), by a list of the system calls that a child may make (seccomp: none that opens a socket, starts
a process or a thread, sends a signal or writes to a file), and by limits of time and memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grail_lightning.worlds.programs.outcome import ProgramLimits
from grail_lightning.worlds.programs.sandbox import EndedError, LostError, Sandbox, StartError, read_reply

_FOLDER = Path(__file__).parent
_STARTUP_SECONDS = 60.0
_RECEIVED_BYTES = 1 << 16  # At a time.
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


def interpreter(limits: ProgramLimits) -> list[str]:
    """The command of a warm interpreter, which an isolation starts where a program can see little.

    It takes connections over its standard input, a socket that it must inherit. It has no site-packages, and of the
    environment nothing but the seed of hashes.
    """
    config = {"seconds": limits.seconds, "memory_mb": limits.memory_mb, "preload": _PRELOAD.split()}
    config["filter"] = _system_calls().hex()
    flags = ["-s", "-S", "-P", "-B", "-X", "utf8"]
    text = "".join((_FOLDER / name).read_text() for name in ("guest.py", "fork_host.py"))
    return [os.path.realpath(sys.executable), *flags, "-c", text, json.dumps(config)]


class ProcessSandbox(Sandbox):
    """One warm interpreter, used by the thread that starts it, with which the kernel ends it.

    Each program has a child and a connection of its own, so nothing that it leaves reaches another. One that does not
    end as told costs the interpreter; the next one gets another.

    Args:
        command: What is started: that of `interpreter`, behind the program that isolates it.
        limits: Of one program with all of its tests.
    """

    def __init__(self, command: Sequence[str], limits: ProgramLimits) -> None:
        super().__init__(limits)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket  # The connections of children go out, their statuses come back.
        self._connection: socket.socket
        self._deadline = 0.0

    def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Sandbox`; the program gets a new child."""
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
        """See `Sandbox`."""
        try:
            reply = read_reply(self._exchange(json.dumps(message).encode() + b"\n", self.cap + more))
        except (EndedError, LostError):
            self.close()
            raise
        if reply is None:
            self.close()
            raise EndedError("refused", "a reply in no form of ours")
        return reply

    def end(self) -> None:
        """See `Sandbox`; the child finds its connection closed."""
        if self._process is None or self._connection.fileno() < 0:
            return
        self._connection.close()
        with contextlib.suppress(OSError):
            if self._in_time(self._control).recv(64) == b"0\n":
                return
        self.close()

    def close(self) -> None:
        """See `Sandbox`; all of its processes are killed."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._control.close()
            self._connection.close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._connection = self._control  # There is no child yet.
        with tempfile.TemporaryFile() as words:
            try:
                self._process = subprocess.Popen(  # noqa: S603 (the command of a sandbox, never a program)
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=words,
                    env={},
                    start_new_session=True,  # all of its processes are one group, which none of them can leave
                )
            except OSError as error:  # There is no such command.
                self._control.close()
                raise StartError(str(error)) from None
            finally:
                theirs.close()
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
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        channel.settimeout(seconds)
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
