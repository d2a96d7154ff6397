"""Files that are no checkpoints, or damaged ones, are told apart before a model is loaded."""

import pickle
import shutil
import types
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file

from grail_lightning.distributed.checkpoint_check import check_checkpoint
from grail_lightning.policy import resolve_policy

STATE = {"state_dict": {"a": torch.zeros(3000)}, "global_step": 3, "pytorch-lightning_version": "2.6.0"}
ONE_FILE = types.SimpleNamespace(checkpoint_io=TorchCheckpointIO())


class Calls:
    """Calls `open` when it is unpickled."""

    def __reduce__(self):
        return open, ("pickle_has_run", "w")


def _cut(file):
    torch.save(STATE, file)
    file.write_bytes(file.read_bytes()[:-2000])


def _scrambled(file):
    torch.save(STATE, file)
    content = bytearray(file.read_bytes())
    content[100:400] = bytes(byte ^ 0x55 for byte in content[100:400])
    file.write_bytes(content)


def _archive(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "b")


NO_CHECKPOINTS = {
    "text": (lambda file: file.write_text("hello\nworld\n"), "is no file of torch. Give last, best or another file"),
    "bytes": (lambda file: file.write_bytes(bytes(range(256)) * 10), "is no file of torch"),
    "pickle": (lambda file: file.write_bytes(pickle.dumps({"a": 1})), "is no file of torch"),
    "pickled call": (lambda file: file.write_bytes(pickle.dumps(Calls())), "is no file of torch"),
    "safetensors": (lambda file: save_file({"a": torch.zeros(3)}, file), "is no file of torch"),
    "archive": (_archive, "is no file of torch"),
    "empty": (lambda file: file.touch(), "which is damaged; no other in its folder is whole"),
    "cut": (_cut, "which is damaged; no other in its folder is whole"),
    "scrambled": (_scrambled, "which is damaged; no other in its folder is whole"),
    "call": (
        lambda file: torch.save(STATE | {"more": Calls()}, file),
        r"holds \w*io\.open, which could run code.*`--weights",
    ),
    "class": (
        lambda file: torch.save(STATE | {"more": torch.nn.Linear}, file),
        r"holds torch\.nn\.modules\.linear\.Linear",
    ),
    "tensor": (lambda file: torch.save(torch.zeros(3), file), r"holds other things \(Tensor\).*`model.policy`"),
    "weights": (lambda file: torch.save(STATE["state_dict"], file), r"holds other things \(a …\)"),
    "version": (
        lambda file: torch.save(STATE | {"pytorch-lightning_version": "x"}, file),
        "saved by no version of Light",
    ),
}


@pytest.mark.parametrize("what", NO_CHECKPOINTS)
def test_a_file_that_is_no_whole_checkpoint_is_told(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, message = NO_CHECKPOINTS[what]
    write(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=rf"`ckpt_path` must .*x\.ckpt.*{message}"):
        check_checkpoint(str(tmp_path / "x.ckpt"), ONE_FILE)
    assert not Path("pickle_has_run").exists()


def test_a_whole_checkpoint_is_taken_and_its_weights_are_handed_out(tmp_path):
    torch.save(STATE, tmp_path / "x.ckpt")
    weights = check_checkpoint(str(tmp_path / "x.ckpt"), ONE_FILE)["state_dict"]
    assert {name: value.shape for name, value in weights.items()} == {"a": (3000,)}
    assert check_checkpoint(None, ONE_FILE) is None


def test_what_the_user_trusts_is_taken(tmp_path):
    torch.save(STATE | {"more": torch.nn.Linear}, tmp_path / "x.ckpt")
    assert check_checkpoint(str(tmp_path / "x.ckpt"), ONE_FILE, weights_only=False)["state_dict"].keys() == {"a"}


def test_a_file_of_another_plugin_is_left_to_it(tmp_path):
    class Own(TorchCheckpointIO):
        pass

    (tmp_path / "x.ckpt").write_text("hello")
    assert check_checkpoint(str(tmp_path / "x.ckpt"), types.SimpleNamespace(checkpoint_io=Own())) is None


def test_a_folder_without_a_checkpoint_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder without one. Give last, best, or a file"):
        check_checkpoint(str(tmp_path), ONE_FILE)
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(ValueError, match=r"is a folder without one. Give one of .*last\.ckpt"):
        check_checkpoint(str(tmp_path), ONE_FILE)
    shutil.copytree(resolve_policy("arithmetic"), tmp_path / "export")
    with pytest.raises(ValueError, match=r"is a policy in Hugging Face format: set `model.policy` to .*export"):
        check_checkpoint(str(tmp_path / "export"), ONE_FILE)


def test_a_folder_of_shards_needs_its_strategy_and_its_metadata(tmp_path):
    for name in (".metadata", "meta.pt"):
        (tmp_path / name).write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"must be one file here, but got a folder of shards. Use the strategy"):
        check_checkpoint(str(tmp_path), ONE_FILE)
    with pytest.raises(ValueError, match=r"must be a whole checkpoint, but got .*, which is damaged"):
        check_checkpoint(str(tmp_path), ModelParallelStrategy())
