"""Methods that look at the whole batch look at that of all ranks: two processes give what one gives."""

from datetime import timedelta

import torch

from grail_lightning.credit import LESS, RLSD, UCAS, AdvantageReweighting, HighEntropy
from tests.credit.rollouts import context, in_groups
from tests.tolerance import assert_near

METHODS = [HighEntropy, UCAS, LESS, AdvantageReweighting, RLSD]
SHARES = [torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])]


def _one_rank(rank, folder, policy, batch):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mine = batch.select(SHARES[rank])
    # Ranks differ in their number of micro-batches.
    found = [method()(policy, mine, context(budget=300 if rank else 5000)) for method in METHODS]
    torch.save([(weights.values, weights.additive) for weights in found], folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_give_the_weights_of_one(golden_policy, golden_batch, tmp_path):
    batch = in_groups(golden_batch)
    # Forked: the policy is already there.
    torch.multiprocessing.start_processes(
        _one_rank, args=(tmp_path, golden_policy, batch), nprocs=2, start_method="fork"
    )
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for k, method in enumerate(METHODS):
        whole = method()(golden_policy, batch, context())
        for rank, rows in enumerate(SHARES):
            width = int(batch.response_lengths[rows].max())
            for found, expected in zip(results[rank][k], (whole.values, whole.additive), strict=True):
                assert (found is None) == (expected is None)
                if found is not None:
                    assert_near(found, expected[rows, :width], 64, torch.float32)
    alone = HighEntropy()(golden_policy, batch.select(SHARES[0]), context()).values
    assert not torch.equal(alone, results[0][0][0]), "a rank by itself has another threshold"
