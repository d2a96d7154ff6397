"""Checkpoints that are whole, whenever a run is killed and however full its disk is."""

import itertools
import multiprocessing
import pickle
import resource
import signal
import socket
import tracemalloc
import types
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from grail_lightning.core.distributed.checkpoint_io import DurableCheckpointIO, read_state, remove_parts
from grail_lightning.core.runtime.files import UNFINISHED

LARGE = 1 << 21  # Numbers of a checkpoint of 8 MiB.
STATE = {"state_dict": {"a": torch.zeros(3000)}, "global_step": 3, "pytorch-lightning_version": "2.6.0"}
ONE_FILE = types.SimpleNamespace(checkpoint_io=TorchCheckpointIO())


def save(file, step, numbers=1000):
    DurableCheckpointIO().save_checkpoint({"global_step": step, "w": torch.full((numbers,), float(step))}, file)


def test_a_checkpoint_replaces_the_one_before_and_leaves_nothing_beside_it(tmp_path):
    file = tmp_path / "checkpoints" / "last.ckpt"
    for step in (1, 2):
        save(file, step)
        assert DurableCheckpointIO().load_checkpoint(file)["w"].eq(step).all()
    assert [found.name for found in file.parent.iterdir()] == ["last.ckpt"]


def test_the_temporary_folder_is_not_used_and_the_file_is_not_collected_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
    tracemalloc.start()
    save(tmp_path / "last.ckpt", 1, LARGE)
    assert tracemalloc.get_traced_memory()[1] < LARGE
    tracemalloc.stop()


def _write_for_ever(file):
    for step in itertools.count(1):
        save(file, step, LARGE)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # The child writes files alone.
def test_a_writer_that_is_killed_while_its_file_grows_leaves_the_one_before_whole(tmp_path):
    file = tmp_path / "last.ckpt"
    writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(file,))
    writer.start()
    part = tmp_path / f".last.ckpt.{socket.gethostname()}.{writer.pid}{UNFINISHED}"
    while not (file.exists() and 0 < _size(part) < 4 * LARGE):
        assert writer.is_alive()
    writer.kill()
    writer.join()
    state = DurableCheckpointIO().load_checkpoint(file)
    assert state["w"].eq(state["global_step"]).all()
    part.touch()  # The writer may just have given its file the name.
    remove_parts(tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def _size(file):
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path, monkeypatch):
    file = tmp_path / "last.ckpt"
    save(file, 1)
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # The nearest that a process can do to a full disk.
    try:
        with pytest.raises(OSError, match=r"earlier one of this name is unchanged: File too large: .*last\.ckpt"):
            save(file, 2, LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert DurableCheckpointIO().load_checkpoint(file)["global_step"] == 1
    assert list(tmp_path.iterdir()) == [file]


SPOILED = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "tail": lambda content: content[:-10],
    "zeros": lambda content: bytes(len(content)),
    "head": lambda content: bytes(len(content) // 2) + content[len(content) // 2 :],
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_damaged_checkpoint_is_never_loaded_and_named_before_a_model_is_loaded(how, tmp_path):
    last = tmp_path / "last.ckpt"
    save(last, 9)
    last.write_bytes(SPOILED[how](last.read_bytes()))
    if how != "head":  # The damaged part is not read yet.
        with pytest.raises(ValueError, match=r"`ckpt_path` must be a checkpoint of a run, .*last\.ckpt cannot be read"):
            read_state(str(last), ONE_FILE)
    with pytest.raises((OSError, RuntimeError, EOFError, pickle.UnpicklingError)):
        DurableCheckpointIO().load_checkpoint(last)


class Calls:
    """Calls `open` when it is unpickled."""

    def __reduce__(self):
        return open, ("pickle_has_run", "w")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: file.write_text("hello\nworld\n"), "cannot be read"),
        (lambda file: file.write_bytes(pickle.dumps(Calls())), "cannot be read"),
        (lambda file: torch.save(STATE | {"more": Calls()}, file), r"GLOBAL \w*io\.open.*`--weights_only=false`"),
        (lambda file: torch.save(torch.zeros(3), file), "holds other things.*`model.policy`"),
        (lambda file: file.mkdir(), "is a folder without one"),
    ],
    ids=["text", "pickle", "call", "tensor", "folder"],
)
def test_what_is_no_checkpoint_is_told_before_a_model_is_loaded(write, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=rf"`ckpt_path` must .*{message}"):
        read_state(str(tmp_path / "x.ckpt"), ONE_FILE)
    assert not Path("pickle_has_run").exists()


def test_shards_without_their_strategy_are_told(tmp_path):
    with pytest.raises(ValueError, match="is a folder of shards, which `--trainer"):
        DurableCheckpointIO().load_checkpoint(tmp_path)


def test_the_state_of_a_whole_checkpoint_is_handed_out(tmp_path):
    torch.save(STATE | {"more": torch.nn.Linear}, tmp_path / "x.ckpt")
    trusted = read_state(str(tmp_path / "x.ckpt"), ONE_FILE, weights_only=False)
    assert trusted["global_step"] == 3
    assert trusted["state_dict"]["a"].shape == (3000,)
    assert read_state(None, ONE_FILE) == {}

    class Own(TorchCheckpointIO):
        """The plugin of a user, which reads its own files."""

    assert read_state(str(tmp_path / "x.ckpt"), types.SimpleNamespace(checkpoint_io=Own())) == {}
