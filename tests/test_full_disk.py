"""Real runs on a disk that is too small: it is told before, and after it the run can be resumed.

A process may mount a disk of its own where nobody else sees it: on Linux as root, or where users may have namespaces.
"""

import json
import re
import sys

import pytest

from tests.processes import run_script
from tests.shell import SHORT

# Mounts a disk of some size, runs the command on it, and prints its exit code and what it wrote; for each of a list.
ON_A_DISK = f"""
import ctypes, json, os, sys
from pathlib import Path
from grail_lightning.__main__ import main

NEW_MOUNTS, NEW_USER, PRIVATE, REMOUNT = 0x20000, 0x10000000, 0x44000, 0x20
libc = ctypes.CDLL(None, use_errno=True)
disk = Path("disk").absolute()
disk.mkdir()
before = os.dup(2)

def mount(kind, folder, flags, options):
    return libc.mount(kind, str(folder).encode(), kind, flags, options.encode()) == 0

def own_disk():
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS):
        if libc.unshare(NEW_MOUNTS | NEW_USER):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {{user}} 1")
        Path("/proc/self/gid_map").write_text(f"0 {{group}} 1")
    if libc.mount(None, b"/", None, PRIVATE, None) or not mount(b"tmpfs", disk, 0, "size=1m"):
        return False
    (disk / "file").touch()
    (disk / "file").unlink()
    return True

try:
    allowed = own_disk()
except OSError:
    allowed = False
if not allowed:
    print(json.dumps("no disk of its own"))
    raise SystemExit

for size, *arguments in json.loads(sys.argv[1]):
    assert mount(b"tmpfs", disk, REMOUNT, f"size={{size}}")
    os.dup2(os.open("console", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv[1:] = ["fit", *{SHORT!r}, "--trainer.logger.init_args.save_dir=disk", *arguments]
    try:
        code = main() or 0
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os.dup2(before, 2)
    found = sorted(str(file.relative_to(disk)) for file in disk.rglob("*.ckpt*"))
    print(json.dumps([code, Path("console").read_text(), found]))
"""


@pytest.fixture
def on_a_disk(tmp_path, monkeypatch):
    """A function from sizes and arguments to exit code, text and checkpoints of runs one after the other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(ON_A_DISK)

    def run(*commands):
        (printed,) = run_script(tmp_path / "script.py", json.dumps(commands))
        answers = [json.loads(line) for line in printed.stdout.splitlines() if line.startswith(("[", '"'))]
        if answers == ["no disk of its own"]:
            pytest.skip("this user may not mount a disk")
        return answers

    return run


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts are Linux's")
CHECKPOINTS = ["quickstart/checkpoints/best.ckpt", "quickstart/checkpoints/last.ckpt"]
LONGER = "--trainer.max_steps=8"


def test_a_run_that_fills_the_disk_says_so_before_and_can_be_resumed(on_a_disk):
    (code, said, found), resumed = on_a_disk(["24m", LONGER], ["60m", LONGER, "--ckpt_path=last"])
    assert code == 2
    assert re.search(r"A checkpoint takes 9\.\d+ MiB, and disk/quickstart/checkpoints has \S+ MiB free", said)
    assert "Failed at step 4; disk/quickstart/checkpoints/last.ckpt is of step 2. Resume with the same command" in said
    assert "unchanged: No space left on device: disk/quickstart/checkpoints/last.ckpt. Free some space" in said
    assert "Traceback" not in said
    assert found == CHECKPOINTS
    assert (resumed[0], resumed[2]) == (0, CHECKPOINTS)
    assert "A checkpoint takes" not in resumed[1]


def test_a_full_disk_under_tensorboard_is_one_line_without_its_traceback(on_a_disk):
    ((code, said, _),) = on_a_disk(["60k", LONGER, "--pictures.every_n_batches=1"])
    assert code == 2
    last_line = said.splitlines()[-1]
    assert "error: No space left on device. Free some space, or choose a folder on another disk." in last_line
