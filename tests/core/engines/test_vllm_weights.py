import copy
import os
from itertools import cycle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig

from grail_lightning import Loading, LoRA
from grail_lightning.core.distributed.sharding import shard
from grail_lightning.core.engines.vllm.weights import WeightFile, checkpoint_weights, fingerprint, same_on_all_ranks
from grail_lightning.core.policy.load import load_policy
from tests.architectures import ARCHITECTURES, SIZES, tiny


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("name", "tied"), list(zip(ARCHITECTURES, cycle([True, False]), strict=False)))
def test_names_and_tensors_are_those_of_a_saved_checkpoint(name, tied, tmp_path):
    policy = tiny(name, tmp_path / "made", tie_word_embeddings=tied)
    policy.save(tmp_path / "saved")
    assert_equal(dict(checkpoint_weights(policy)), load_file(tmp_path / "saved" / "model.safetensors"))


@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "up_proj"]])
def test_adapters_are_merged_as_an_export_merges_them(targets, tmp_path):
    lora = LoRA(rank=3, alpha=5.0, target_modules=targets)
    policy = tiny("qwen3", tmp_path / "made", lora, tie_word_embeddings=False)
    before = copy.deepcopy(policy.state_dict())
    found = dict(checkpoint_weights(policy))
    policy.save(tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13)
    assert_equal(policy.state_dict(), before)


@pytest.mark.parametrize("lora", [None, LoRA(rank=3)])
def test_sharded_weights_are_gathered_one_by_one_and_the_policy_stays_sharded(lora, tmp_path):
    policy = tiny("qwen3", tmp_path / "made", lora).float()
    expected = {name: value.clone() for name, value in checkpoint_weights(policy)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        shard(policy, init_device_mesh("cpu", (1,)))
        policy.reshard()  # The trial run of `shard` leaves its root gathered.
        found = {}
        for name, value in checkpoint_weights(policy):
            assert type(value) is not DTensor
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
            found[name] = value
        assert_equal(found, expected)
        first = fingerprint(policy)
        assert same_on_all_ranks(fingerprint(policy), first)
        next(policy.blocks[0].mlp.up_proj.parameters()).to_local().data.mul_(1 + 1e-6)
        assert not same_on_all_ranks(fingerprint(policy), first)
    finally:
        torch.distributed.destroy_process_group()


def test_experts_of_a_mixture_are_handed_out_as_their_checkpoint_names_them(tmp_path):
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    config.save_pretrained(tmp_path / "made")
    load_policy("arithmetic").tokenizer.save_pretrained(tmp_path / "made")
    policy = load_policy(str(tmp_path / "made"), Loading(from_scratch=True))
    policy.save(tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    assert any(".experts.3." in name for name in expected)
    assert_equal(dict(checkpoint_weights(policy)), expected)


@pytest.fixture
def policy():
    return load_policy("arithmetic")


def test_a_fingerprint_notices_every_kind_of_write(policy):
    """Counters of changes miss the first three, and plain sums all but the first."""
    weight = policy.blocks[1].mlp.up_proj.weight
    first = fingerprint(policy)
    assert not same_on_all_ranks(first, None)
    assert same_on_all_ranks(fingerprint(policy), first)
    for write in (
        lambda: weight.data.view(-1)[7:8].mul_(1 + 1e-6),
        lambda: weight.data.copy_(weight.data.flip(0)),
        lambda: weight.data.copy_(weight.data.flip(1)),
        lambda: weight.copy_(weight.roll(1, 0)),
    ):
        with torch.no_grad():
            write()
        last = fingerprint(policy)
        assert not same_on_all_ranks(last, first)
        assert same_on_all_ranks(fingerprint(policy), last)
        first = last


def test_fingerprints_of_other_dtypes_notice_one_rounding(policy):
    for dtype in (torch.float64, torch.bfloat16):
        policy.to(dtype)
        first = fingerprint(policy)
        weight = policy.model.get_input_embeddings().weight
        with torch.no_grad():
            weight[3, 5] = torch.nextafter(weight[3, 5], weight.new_tensor(torch.inf))
        assert (fingerprint(policy) != first).sum() == 1


def test_matrices_are_written_as_the_server_computes_and_vectors_as_they_are(tmp_path):
    """Whoever reads the earlier weights may go on."""
    whole = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    file = WeightFile(str(tmp_path), "mine")
    tensors = [("rows", whole[:2]), ("turned", whole.T), ("norm", whole[0]), ("mask", whole[0] > 0)]
    path = file.write("run-1", tensors, torch.bfloat16)
    with safe_open(path, "pt") as reading:
        assert reading.metadata() == {"version": "run-1"}
        file.write("run-2", [("rows", torch.zeros(2, 7))], torch.bfloat16)
        assert torch.equal(reading.get_tensor("rows"), whole[:2].bfloat16())
        assert torch.equal(reading.get_tensor("turned"), whole.T.bfloat16())
        assert torch.equal(reading.get_tensor("norm"), whole[0])
        assert torch.equal(reading.get_tensor("mask"), whole[0] > 0)
    assert load_file(path).keys() == {"rows"}


def test_a_fork_and_another_rank_leave_the_file_alone(tmp_path):
    """A data loader's worker ends while the run goes on, and so may a second run."""
    file, other = WeightFile(str(tmp_path), "mine"), WeightFile(str(tmp_path), "mine")
    path = file.write("run-1", [("ones", torch.ones(3))], torch.float32)
    child = os.fork()
    if child == 0:
        file.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.close()
    assert torch.equal(load_file(path)["ones"], torch.ones(3))
    other.write("run-2", [("ones", torch.zeros(3))], torch.float32)
    file.close()
    assert torch.equal(load_file(path)["ones"], torch.zeros(3)), "the file of a newer run stays"
    other.close()
    assert not os.path.exists(path)
