"""Weights that are whole for a while: what ranks do inside is their own affair; and what is tried before sharding."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from grail_lightning import AdvantageEstimator, DrGRPO, GroupMean, Sampling, build_batch
from grail_lightning.core.distributed.sharding import gathered, shard
from grail_lightning.core.policy import capabilities
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.assign import compute_advantages, weigh_batch
from grail_lightning.credit import AnswerOnly, OARGradient, Uniform
from tests.batches import graded, rollouts
from tests.core.credit.rollouts import context
from tests.processes import group, on_ranks
from tests.runs import batches, module, problems, strategy_of, trainer


class Lengths(AdvantageEstimator):
    """An estimator of one's own that calls a part of the policy directly."""

    def __call__(self, batch, group_size, context):
        with torch.no_grad():
            states = context.policy.decode(context.policy.layout(batch))
        return states.isfinite().all() * batch.response_mask.sum(1).double()


def _passes():
    with group() as rank:
        policy = shard(load_policy("arithmetic").train(), init_device_mesh("cpu", (2,)))
        ids = torch.arange(12)[None] % 10 + 2
        everything = torch.ones_like(ids, dtype=torch.bool)
        layout = padded_layout(ids, everything, everything[:, 4:])
        policy(layout).sum().backward()  # Its end leaves no order of passes.
        with gathered(policy), torch.no_grad():
            for _ in range(2 * rank):  # Rank 0 makes no pass, rank 1 two.
                policy.decode(layout)
        policy(layout).sum().backward()
        report = {"gradient": policy.blocks[0].self_attn.q_proj.weight.grad.to_local().any().item()}
        sampled = build_batch(policy, problems(1), 2, [[5, 6], [7]], [True] * 2)
        batch = rollouts(sampled, group_size=2)
        for credit in (Uniform(), OARGradient()):
            with CommDebugMode() as sent:
                weigh_batch(credit, AnswerOnly(), policy, batch, context())
            report[type(credit).__name__] = sent.get_total_counts() > 0
        for estimator in (GroupMean(), Lengths()):
            with CommDebugMode() as sent:
                compute_advantages(
                    graded(sampled, torch.tensor([1.0, 0.0])), 2, estimator, DrGRPO(), policy, context(step=1)
                )
            report[type(estimator).__name__] = sent.get_total_counts() > 0
        return report


def test_ranks_may_make_unequal_numbers_of_passes_and_what_does_not_run_the_policy_gathers_nothing():
    gathers = {"Uniform": False, "OARGradient": True, "GroupMean": False, "Lengths": True}
    assert on_ranks(_passes, timeout=90) == [{"gradient": True, **gathers}] * 2


def _tried():
    """The dtype of the blocks in the trial that chooses the kernel of prefix trees, in a fit under FSDP2."""
    with pytest.MonkeyPatch.context() as patch:
        dtypes = []
        patch.setattr(capabilities, "find_tree_kernel", lambda policy: dtypes.append(str(policy.compute_dtype)))
        fsdp2 = trainer(1, precision="bf16-mixed", devices=2, strategy=strategy_of("fsdp2"))
        fsdp2.fit(module(sampling=Sampling(max_response_length=2)), batches(2, size=2))
        return dtypes


def test_the_kernel_of_prefix_trees_is_chosen_in_the_precision_of_the_run():
    assert on_ranks(_tried) == [["torch.bfloat16"]] * 2
