"""A folder has one holder at a time, and one that has ended holds nothing."""

import os
import signal
import subprocess
import sys

import pytest

from grail_lightning.runtime.files import held

HOLDS = """
import pathlib, sys, time
from grail_lightning.runtime.files import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_refused_while_another_process_lives_and_free_when_it_was_killed(tmp_path):
    folder = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        message = rf"run is in use by another fit \(process {other.pid} on .*`trainer\."
        with pytest.raises(ValueError, match=message), held(folder):
            pass
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    with held(folder):
        pass


def test_the_lock_is_free_after_a_run_that_failed(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"), held(tmp_path / "run"):
            raise RuntimeError("boom")
