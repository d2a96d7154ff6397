"""Strategies by the names that users give them."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import grail_lightning
from grail_lightning.cli import GrailCLI
from grail_lightning.distributed.sharding import check_strategy, load_on_ranks
from grail_lightning.policy import Loading
from tests.processes import run_script
from tests.shell import RUN, SHORT, fails, main


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _built(monkeypatch, *options):
    """The strategy that a command line ends up with; nothing is run."""
    built = []

    class Built(GrailCLI):
        def _run_subcommand(self, subcommand):
            built.append(self.trainer.strategy)

    monkeypatch.setattr("grail_lightning.cli.app.GrailCLI", Built)
    main(["fit", *SHORT, *options])
    return built[0]


def test_sharded_weights_train_from_the_command_line():
    # A process of its own, since a process group is made.
    options = ["--trainer.strategy=ModelParallelStrategy", "--trainer.max_steps=1"]
    run_script(Path(grail_lightning.__file__).with_name("__main__.py"), "fit", *SHORT, *options)
    assert (RUN / "export" / "model.safetensors").is_file()
    saved = yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["strategy"]
    assert saved["class_path"].endswith(".ModelParallelStrategy")


@pytest.mark.parametrize(
    "name", ["ModelParallelStrategy", "lightning.pytorch.strategies.ModelParallelStrategy", "fsdp"]
)
def test_a_name_alone_shards_over_all_devices(name, monkeypatch, caplog):
    strategy = _built(monkeypatch, f"--trainer.strategy={name}", "--trainer.devices=2")
    assert isinstance(strategy, ModelParallelStrategy)
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (2, 1)
    assert ("runs FSDP2" in caplog.text) == (name == "fsdp")


def test_fsdp1_is_refused_on_the_command_line_and_as_an_object(capsys):
    said = fails(capsys, "fit", *SHORT, "--trainer.strategy=FSDPStrategy")
    assert re.search("`trainer.strategy` must not be FSDP1, but got .*--trainer.strategy=ModelParallelStrategy", said)
    with pytest.raises(ValueError, match="must not be FSDP1, but got FSDPStrategy"):
        check_strategy(FSDPStrategy())
    check_strategy(DDPStrategy())
    check_strategy(ModelParallelStrategy())


def test_devices_that_would_share_layers_are_refused():
    """Lightning's own default for one node: each device would train a policy of its own."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        with pytest.raises(ValueError, match=r"`tensor_parallel_size` must be 1.* got 2\. .*data_parallel_size=2"):
            load_on_ranks("arithmetic", Loading(), mesh, half_precision=False, trainable=True)
    finally:
        torch.distributed.destroy_process_group()
