"""Strategies by the names that users give them."""

import re
import shutil

import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from grail_lightning import Loading
from grail_lightning.core.distributed.sharding import check_strategy, load_on_ranks
from tests.shell import RUN, SHORT, built, fails, main

pytestmark = pytest.mark.usefixtures("empty_folder")

# No validation; two responses to each of two prompts.
UNSEEN = [
    "--trainer.val_check_interval=1000",
    "--evaluation.at_start=false",
    "--evaluation.at_end=false",
    "--model.execution.group_size=2",
    "--model.execution.mini_batches=2",
    "--data.prompts_per_batch=2",
    "--model.objective.entropy_coefficient=0.1",
]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")  # Of torch: best.ckpt, a folder, is better now.
@pytest.mark.filterwarnings("ignore:It is recommended to use")  # One process is no reason to synchronise.
def test_sharded_weights_train_from_the_command_line_and_a_resumed_run_ends_on_those_of_a_whole_one(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # Lightning sets them for good.
        monkeypatch.delenv(name)
    by_path = "--trainer.strategy=lightning.pytorch.strategies.ModelParallelStrategy"
    exports = []
    # The second one ends inside the first batch, and is resumed from its beginning, before any step.
    for steps, *more in ([4], [1], [2, "--ckpt_path=last"], [4, "--ckpt_path=last"]):
        if not more:
            shutil.rmtree("runs", ignore_errors=True)
        try:
            main(["fit", *SHORT, *UNSEEN, by_path, f"--trainer.max_steps={steps}", *more])
        finally:
            torch.distributed.destroy_process_group()
        exports.append(load_file(RUN / "export" / "model.safetensors"))
    whole, _, half, resumed = exports
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    assert any(not torch.equal(weight, half[name]) for name, weight in whole.items())
    saved = yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["strategy"]
    assert saved["class_path"].endswith(".ModelParallelStrategy")


@pytest.mark.parametrize("name", ["ModelParallelStrategy", "fsdp"])
def test_a_name_alone_shards_over_all_devices(name, caplog):
    strategy = built(*SHORT, f"--trainer.strategy={name}", "--trainer.devices=2").trainer.strategy
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
