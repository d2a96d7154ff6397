"""Weights that are whole for a while: what ranks do inside is their own affair."""

from tests.processes import run_script

TWO_RANKS = """
import os, sys, warnings
import torch, torch.distributed as dist
warnings.filterwarnings("ignore")
from torch.distributed.device_mesh import init_device_mesh
from grail_lightning.distributed.sharding import gathered, shard
from grail_lightning.policy import load_policy
from grail_lightning.policy.layout import padded_layout

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
policy = shard(load_policy("arithmetic").train(), init_device_mesh("cpu", (2,)))
ids = torch.arange(12)[None] % 10 + 2
layout = padded_layout(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids[:, 4:], dtype=torch.bool))

def step():
    policy(layout).logprobs.sum().backward()

step()  # Its end leaves no order of passes.
with gathered(policy), torch.no_grad():
    for _ in range(2 * rank):  # Rank 0 makes no pass, rank 1 two.
        policy.decode(layout)
step()
print("both steps", float(policy.blocks[0].self_attn.q_proj.weight.grad.to_local().abs().sum()) > 0)
dist.destroy_process_group()
"""


def test_ranks_may_make_unequal_numbers_of_passes(tmp_path):
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    printed = run_script(tmp_path / "ranks.py", tmp_path / "store", ranks=2, timeout=60)
    assert [rank.stdout.splitlines()[-1] for rank in printed] == ["both steps True"] * 2
