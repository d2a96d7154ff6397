"""A folder has one holder at a time, and one that has ended holds nothing."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from grail_lightning.runtime.folder_lock import LOCK, held

HOLDS = """
import pathlib, sys, time
from grail_lightning.runtime.folder_lock import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
# Hands the lock to a program that waits for its input to end, and is killed.
HANDS_ON = """
import os, pathlib, signal, subprocess, sys
from grail_lightning.runtime.folder_lock import held
with held(pathlib.Path(sys.argv[1])) as descriptor:
    waits = [sys.executable, "-c", "import sys; print('has it', flush=True); sys.stdin.read()"]
    subprocess.Popen(waits, pass_fds=(descriptor,))
    os.kill(os.getpid(), signal.SIGKILL)
"""
# Enters and leaves many times. Inside, making a folder fails if another process is inside, too.
ENTERS = """
import pathlib, sys, time
from grail_lightning.runtime.folder_lock import held
folder, entered = pathlib.Path(sys.argv[1]), 0
while entered < 150:
    try:
        with held(folder):
            (folder.parent / "inside").mkdir()
            time.sleep(0.001)
            (folder.parent / "inside").rmdir()
            entered += 1
    except ValueError:
        pass
"""


def _start(script, folder):
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)


def _left_by(host, folder):
    folder.mkdir()
    record = json.dumps({"host": host, "pid": 4711, "since": "2026-01-01T00:00:00+00:00"})
    (folder / LOCK).write_text(record)


def test_a_program_that_inherits_the_lock_has_it_until_it_ends(tmp_path):
    command, pipe = [sys.executable, "-c", HANDS_ON, str(tmp_path / "run")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "has it\n"
        assert other.wait() == -signal.SIGKILL
        with pytest.raises(ValueError, match="in use by another fit"), held(tmp_path / "run"):
            pass
        other.stdin.close()
        assert other.stdout.read() == "", "the program has ended"
        with held(tmp_path / "run"):
            pass


def test_a_folder_is_refused_while_another_process_lives_and_free_when_it_was_killed(tmp_path):
    other = _start(HOLDS, tmp_path / "run")
    try:
        assert other.stdout.readline() == "held\n"
        message = rf"run is in use by another fit \(process {other.pid} on {socket.gethostname()}, since 2.*`trainer\."
        with pytest.raises(ValueError, match=message), held(tmp_path / "run"):
            pass
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    assert (tmp_path / "run" / LOCK).exists()
    with held(tmp_path / "run", patience=600):
        pass


def test_the_holder_is_one_whoever_comes_and_goes(tmp_path):
    crowd = [_start(ENTERS, tmp_path / "run") for _ in range(3)]
    for process in crowd:
        process.communicate(timeout=60)
    assert [process.returncode for process in crowd] == [0, 0, 0]
    assert list((tmp_path / "run").iterdir()) == []


def test_the_lock_is_gone_after_a_run_that_failed(tmp_path):
    def fail_inside(folder):
        with held(folder):
            assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_inside(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def _touching(file, ended):
    while not ended.wait(0.05):
        os.utime(file)


@pytest.mark.parametrize("locks", [True, False])
def test_a_holder_on_another_host_counts_while_it_touches_the_lock(locks, tmp_path, monkeypatch):
    if not locks:  # as on some network file systems

        def flock(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", flock)
    _left_by("elsewhere", tmp_path / "run")
    ended = threading.Event()
    alive = threading.Thread(target=_touching, args=(tmp_path / "run" / LOCK, ended))
    alive.start()
    try:
        with pytest.raises(ValueError, match=r"process 4711 on elsewhere, since 2026-01-01"), held(tmp_path / "run"):
            pass
    finally:
        ended.set()
        alive.join()
    with held(tmp_path / "run", patience=0.3):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["host"] == socket.gethostname()


def test_a_live_holder_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("grail_lightning.runtime.folder_lock.BEAT_SECONDS", 0.02)
    _left_by("elsewhere", tmp_path / "run")
    with held(tmp_path / "run", patience=0.1):
        file = tmp_path / "run" / LOCK
        os.utime(file, (0, 0))
        for _ in range(500):
            if file.stat().st_mtime > 0:
                break
            threading.Event().wait(0.02)
        assert file.stat().st_mtime > 0


def test_a_lock_that_cannot_be_read_names_nobody(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("{")
    with held(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / LOCK).read_text()
