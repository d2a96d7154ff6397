"""Weights as a file that servers read: its format, its places, and how a server fetches it."""

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from grail_lightning.engines.vllm.publish import WeightFile, is_loopback, most_tensors, write_safetensors
from grail_lightning.engines.vllm.weights import checkpoint_weights
from grail_lightning.policy import load_policy
from grail_lightning.vllm_worker import extension

TENSORS = {
    "a.weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "b.norm": torch.tensor([1.0, 1 + 2**-20]),
    "c.weight": torch.randn(2, 7, generator=torch.Generator().manual_seed(1)).bfloat16().T,
}


def tensors():
    yield from TENSORS.items()


@pytest.fixture
def published():
    made = []

    def make(**options):
        made.append(WeightFile(**options))
        return made[-1]

    yield make
    for file in made:
        file.close()


def test_the_library_reads_what_is_written_one_tensor_at_a_time(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        size = write_safetensors(file, tensors(), 3, torch.float32, "run-1")
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(found[name], value.float())
    assert size == (tmp_path / "file").stat().st_size
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"version": "run-1"}


def test_matrices_are_written_as_the_server_computes_and_vectors_as_they_are(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        write_safetensors(file, tensors(), 3, torch.bfloat16, "run-1")
    found = load_file(tmp_path / "file")
    assert torch.equal(found["a.weight"], TENSORS["a.weight"].bfloat16())
    assert found["b.norm"].dtype == torch.float32
    assert torch.equal(found["b.norm"], TENSORS["b.norm"])


def test_more_tensors_than_there_is_room_for_are_refused(tmp_path):
    many = ((f"{'layer.' * 20}{k}", torch.zeros(2, 2)) for k in range(100))
    with (
        open(tmp_path / "file", "wb") as file,
        pytest.raises(ValueError, match="The header of 100 tensors must"),
    ):
        write_safetensors(file, many, 2, torch.float32, "run-1")


def test_integers_are_refused(tmp_path):
    with open(tmp_path / "file", "wb") as file, pytest.raises(ValueError, match="`k` must be of floating point"):
        write_safetensors(file, iter([("k", torch.arange(3))]), 1, torch.float32, "run-1")


def test_a_whole_policy_has_room(published):
    policy = load_policy("arithmetic")
    file = published()
    file.write("run-1", checkpoint_weights(policy), most_tensors(policy), torch.float32)
    found = load_file(file.source("127.0.0.1", 1))
    assert found.keys() == dict(checkpoint_weights(policy)).keys()


def test_on_one_machine_the_file_is_memory_of_this_process_that_ends_with_it(published):
    file = published()
    file.write("run-1", tensors(), 3, torch.float32)
    path = file.source("localhost", 1)
    assert path.startswith(f"/proc/{os.getpid()}/fd/")
    assert torch.equal(load_file(path)["a.weight"], TENSORS["a.weight"])
    with safe_open(path, "pt") as reading:
        file.write("run-2", iter([("a.weight", torch.zeros(5, 3))]), 1, torch.float32)
        assert torch.equal(reading.get_tensor("a.weight"), TENSORS["a.weight"]), "who is reading it may go on"
    assert not load_file(file.source("localhost", 1))["a.weight"].any()
    file.close()
    assert not Path(path).exists()


def test_a_folder_holds_the_newest_file_alone(published, tmp_path):
    file = published(folder=str(tmp_path))
    for version in ("run-1", "run-2"):
        file.write(version, tensors(), 3, torch.float32)
        path = file.source("10.1.2.3", 8000)
        assert path == f"{tmp_path}/grail-{version}.safetensors"
        assert [str(found) for found in tmp_path.iterdir()] == [path]
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_server_elsewhere_fetches_the_file_once_for_all_of_its_workers(published):
    file = published(address="127.0.0.1")
    file.write("run-1", tensors(), 3, torch.float32)
    url = file.source("192.0.2.7", 8000)
    found = []
    threads = [threading.Thread(target=lambda: found.append(extension._fetch(url, "run-1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len(found) == 4
        assert len(set(found)) == 1
        assert torch.equal(load_file(found[0])["a.weight"], TENSORS["a.weight"])
    finally:
        extension._remove_fetched("run-1")
    assert not found[0].exists()


@pytest.mark.parametrize("change", [lambda url: url.replace("run-1", "run-2"), lambda url: url[:30] + "x" + url[31:]])
def test_who_does_not_know_the_secret_or_asks_for_other_weights_gets_none(change, published):
    file = published(address="127.0.0.1")
    file.write("run-1", tensors(), 3, torch.float32)
    url = file.source("192.0.2.7", 8000)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(change(url))


def test_a_file_that_arrives_in_part_is_not_used(published, monkeypatch):
    file = published(address="127.0.0.1")
    file.write("run-1", tensors(), 3, torch.float32)
    monkeypatch.setattr("shutil.copyfileobj", lambda source, target, length: target.write(source.read(100)))
    with pytest.raises(OSError, match="only 100 of"):
        extension._fetch(file.source("192.0.2.7", 8000), "run-1")
    monkeypatch.undo()
    path = extension._fetch(file.source("192.0.2.7", 8000), "run-1")
    assert load_file(path).keys() == TENSORS.keys()
    extension._remove_fetched("run-1")


def test_files_of_servers_that_were_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "_folder", lambda: tmp_path)
    mine, orphan, other = (
        tmp_path / name for name in ("grail-weights-1-run-1", "grail-weights-4194999-run-1", "other")
    )
    for file in (mine, orphan, other):
        file.touch()
    extension._remove_orphans()
    assert mine.exists()
    assert other.exists()
    assert not orphan.exists()


def test_a_version_that_is_no_name_is_refused():
    with pytest.raises(ValueError, match="`version` must be digits"):
        extension._fetch("http://127.0.0.1:1/x", "../../etc/passwd")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.3.4.5", True), ("::1", True), ("10.0.0.1", False), ("node", False)],
)
def test_the_loopback_address_is_known(host, loopback):
    assert is_loopback(host) == loopback
