"""Weights that are whole for a while: what ranks do inside is their own affair."""

from tests.processes import run_script

TWO_RANKS = """
import os, sys, warnings
import torch, torch.distributed as dist
warnings.filterwarnings("ignore")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from grail_lightning.credit import AnswerOnly, OARGradient, Uniform
from grail_lightning.distributed.sharding import gathered, shard
from grail_lightning.engines import build_batch
from grail_lightning.policy import load_policy
from grail_lightning.policy.layout import padded_layout
from grail_lightning.step.assign import run_credit
from tests.batches import rollouts
from tests.credit.rollouts import context
from tests.runs import problems

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

batch = rollouts(build_batch(policy, problems(1), 2, [[5, 6], [7]], [True] * 2), group_size=2)
for credit in (Uniform(), OARGradient()):
    with CommDebugMode() as sent:
        run_credit(credit, AnswerOnly(), policy, batch, context())
    print(type(credit).__name__, sent.get_total_counts() > 0)
dist.destroy_process_group()
"""


def test_ranks_may_make_unequal_numbers_of_passes_and_uniform_credit_gathers_nothing(tmp_path):
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    printed = run_script(tmp_path / "ranks.py", tmp_path / "store", ranks=2, timeout=60)
    expected = ["both steps True", "Uniform False", "OARGradient True"]
    assert [rank.stdout.splitlines()[-3:] for rank in printed] == [expected] * 2
