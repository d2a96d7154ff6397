"""Sharded weights that stay on the host, which is the device, too, in all of these runs but the emulated one."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration

from grail_lightning.policy import Loading, load_policy
from grail_lightning.policy.sharding import data_parallel_mesh, shard
from tests.processes import run_script
from tests.runs import batches, module, trainer

OFFLOAD = Loading(offload=True)


def _mesh(kind, backend, store):
    torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
    return init_device_mesh(kind, (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))


@pytest.fixture
def no_group():
    """The process group that a test makes ends with it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _run(script, *arguments, ranks=1):
    printed = run_script(Path(__file__).with_name(script), *arguments, ranks=ranks)
    return [json.loads(line) for rank in printed for line in rank.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_on_the_host_ends_on_the_weights_of_a_whole_one_on_the_device(ranks, tmp_path):
    """To the bit: the optimiser's state comes back from a checkpoint, and the export has the same weights."""
    reports = _run("offloaded.py", ranks, tmp_path, ranks=ranks)
    assert sorted(report["rank"] for report in reports) == [*range(ranks)]
    begun = _sums(load_policy("arithmetic"))
    for report in reports:
        assert set(report["policies"]) == {"CPUOffloadPolicy"}
        for figure in ("texts", "norms", "weights"):
            assert report[figure]["host"] == report[figure]["device"], figure
        assert report["norms"]["host"] > 0
        assert report["weights"]["host"] != begun
    assert _sums(load_policy(str(tmp_path / "export"))) == reports[0]["weights"]["host"]
    for folder in ("device", "begun", "host"):  # Written twice, beside its place, of which nothing is left.
        assert [found.name for found in (tmp_path / folder).iterdir()] == ["last.ckpt"]
        assert (tmp_path / folder / "last.ckpt").is_dir()


def _sums(policy):
    flat = [p.detach().double().flatten() for p in policy.parameters()]
    return [(w * torch.linspace(1, 2, len(w), dtype=torch.float64)).sum().item() for w in flat]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch emulates no devices in Python",
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_beside_another_device_blocks_travel_there_and_gradients_back(ranks):
    """On an emulated device, which refuses operations between two."""
    (lying,) = _run("second_device.py", ranks)
    for thing in ("policy", "gathered", "sampling", "buffers"):
        assert lying[thing] == "second", thing
    for thing in ("weights", "gradients", "state"):
        assert lying[thing] == "cpu", thing


@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_weights_are_torchs_and_stay_where_they_are(offload, no_group):
    mesh = _mesh("cpu", "gloo", torch.distributed.HashStore())
    loading = Loading(offload=offload)
    policy = shard(load_policy("arithmetic", loading), data_parallel_mesh(mesh, loading))
    states = [module._get_fsdp_state() for module in policy.modules() if isinstance(module, FSDPModule)]
    assert len(states) == len(policy.blocks) + 1
    for state in states:
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            assert isinstance(group.offload_policy, CPUOffloadPolicy) == offload
    # Lightning sends the module to the device when it sets a run up.
    torch.nn.ModuleList([policy]).to("meta")
    assert {p.device.type for p in policy.parameters()} == {"cpu" if offload else "meta"}
    policy.to(torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert policy.device.type == ("cpu" if offload else "meta")


def test_offloading_without_a_device_mesh_is_refused_before_weights_are_read(monkeypatch):
    def read(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("grail_lightning.module.load_policy", read)
    with pytest.raises(ValueError, match=r"`loading.offload` .* `--trainer.strategy=ModelParallelStrategy`"):
        trainer(1).fit(module(loading=OFFLOAD), batches(1))


def test_offloading_needs_collectives_of_host_tensors(no_group):
    """Groups for CUDA as they are named; their backend is torch's stand-in, which sends nothing."""
    mesh = _mesh("cuda", "cuda:fake", FakeStore())
    assert data_parallel_mesh(mesh, Loading()).size() == 1
    with pytest.raises(ValueError, match=r"process_group_backend=cpu:gloo,cuda:fake`"):
        data_parallel_mesh(mesh, OFFLOAD)


def test_offloading_takes_a_group_with_a_backend_for_each(no_group):
    mesh = _mesh("cuda", "cpu:fake,cuda:fake", FakeStore())
    assert data_parallel_mesh(mesh, OFFLOAD).device_type == "cuda"
