"""Offloaded weights beside a device that is not the host; where things lie is printed as JSON.

python tests/second_device.py RANKS

Tensors have shapes and devices but no entries (torch's fake tensors), the device is torch's stand-in for a backend in
Python, and so are the process group, which sends nothing, and streams. Operations between two devices are refused.
"""

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from transformers import AutoConfig, AutoModelForCausalLM

from grail_lightning.policy import Loading, Policy, load_tokenizer, resolve_policy
from grail_lightning.policy.sharding import data_parallel_mesh, gathered, shard

NAME = "second"


class Stream:
    """A stream or an event of a device that does nothing."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        return self

    def nothing(self, *_):
        pass

    record_event = record
    wait = wait_event = wait_stream = synchronize = nothing


class Device(backend_registration._DummyBackendModule):
    """What FSDP asks of a device."""

    Stream = Event = Stream

    def current_stream(self, *_):
        return Stream()

    def stream(self, _):
        return nullcontext()


def relabel(parameters, buffers, device):
    """Fake tensors stay where they are when their data is set."""
    for tensor in [*parameters, *buffers]:
        tensor.fake_device = device


def places(tensors):
    """Device type of all of them; of a sharded tensor that of its shard."""
    return " and ".join(sorted({(t.to_local() if hasattr(t, "to_local") else t).device.type for t in tensors}))


def main(ranks):
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Device())
    torch.Event, torch.accelerator.current_stream = Stream, Device().current_stream
    _fsdp_init._move_states_to_device = relabel
    torch.distributed.init_process_group(f"cpu:fake,{NAME}:fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh(NAME, (ranks, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    loading, tokenizer = Loading(offload=True), load_tokenizer("arithmetic")
    config = AutoConfig.from_pretrained(resolve_policy("arithmetic"))
    # Which entries a mask picks is not known of fake tensors; the decoder and the head stand for the forward pass.
    Policy.forward = lambda self, ids, mask, _: self.head(self.hidden(mask, input_ids=ids))
    report = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), tokenizer, loading)
        shard(policy, data_parallel_mesh(mesh, loading))
        torch.nn.ModuleList([policy]).to(NAME)  # As Lightning does.
        report["policy"] = policy.device.type
        optimizer = torch.optim.AdamW(policy.parameters())
        ids = torch.zeros(1, 6, dtype=torch.long, device=policy.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        for _ in range(2):
            with gathered(policy), torch.no_grad():
                report["gathered"] = places(policy.parameters())
                report["sampling"] = places([policy.head(policy.hidden(mask, input_ids=ids))])
            for _ in range(2):
                policy(ids, mask, mask).sum().backward()
            report["gradients"] = places(p.grad for p in policy.parameters())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        report["weights"] = places(policy.parameters())
        report["state"] = places(value for state in optimizer.state.values() for value in state.values())
        report["buffers"] = places(policy.buffers())
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
