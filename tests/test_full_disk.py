"""Real runs on a disk that is too small: it is told before, and after it the run can be resumed.

A process may mount a disk of its own where nobody else sees it: on Linux as root, or where users may have namespaces.
"""

import ctypes
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from grail_lightning.__main__ import main
from tests.processes import on_ranks
from tests.shell import SHORT

NEW_MOUNTS, NEW_USER, PRIVATE, REMOUNT = 0x20000, 0x10000000, 0x44000, 0x20


def _mount(libc, flags, options):
    return libc.mount(b"tmpfs", b"disk", b"tmpfs", flags, options.encode()) == 0


def _own_disk(libc):
    """Mount a disk on the folder `disk`, for this process alone; False if this user may not."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS):
        if libc.unshare(NEW_MOUNTS | NEW_USER):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(None, b"/", None, PRIVATE, None) or not _mount(libc, 0, "size=1m"):
        return False
    Path("disk/file").touch()
    Path("disk/file").unlink()
    return True


def _runs(*commands):
    """Of runs on a disk of some size, one after the other: exit code, text and checkpoints; None without a disk."""
    warnings.simplefilter("default")
    libc = ctypes.CDLL(None, use_errno=True)
    Path("disk").mkdir()
    try:
        if not _own_disk(libc):
            return None
    except OSError:
        return None
    results = []
    for number, (size, *arguments) in enumerate(commands):
        assert _mount(libc, REMOUNT, f"size={size}")
        os.dup2(os.open(f"console{number}", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = ["fit", *SHORT, "--trainer.logger.init_args.save_dir=disk", *arguments]
        try:
            code = main() or 0
        except SystemExit as end:
            code = end.code
        sys.stderr.flush()
        checkpoints = sorted(str(file.relative_to("disk")) for file in Path("disk").rglob("*.ckpt*"))
        results.append((code, Path(f"console{number}").read_text(), checkpoints))
    return results


def on_a_disk(*commands):
    (results,) = on_ranks(_runs, *commands, ranks=1)
    return results or pytest.skip("this user may not mount a disk")


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="mounts are Linux's"),
    pytest.mark.usefixtures("empty_folder"),
]
CHECKPOINTS = ["quickstart/checkpoints/best.ckpt", "quickstart/checkpoints/last.ckpt"]
LONGER = "--trainer.max_steps=8"


@pytest.mark.slow
def test_a_run_that_fills_the_disk_says_so_before_and_can_be_resumed():
    (code, said, found), resumed = on_a_disk(["24m", LONGER], ["60m", LONGER, "--ckpt_path=last"])
    assert code == 2
    assert re.search(r"A checkpoint takes 9\.\d+ MiB, and disk/quickstart/checkpoints has \S+ MiB free", said)
    assert "Failed at step 4; disk/quickstart/checkpoints/last.ckpt is of step 2. Resume with the same command" in said
    assert "unchanged: No space left on device: disk/quickstart/checkpoints/last.ckpt. Free some space" in said
    assert "Traceback" not in said
    assert found == CHECKPOINTS
    assert (resumed[0], resumed[2]) == (0, CHECKPOINTS)
    assert "A checkpoint takes" not in resumed[1]


def test_a_full_disk_under_tensorboard_is_one_line_without_its_traceback():
    ((code, said, _),) = on_a_disk(["60k", LONGER, "--pictures.every_n_batches=1"])
    assert code == 2
    last_line = said.splitlines()[-1]
    assert "error: No space left on device. Free some space, or choose a folder on another disk." in last_line
