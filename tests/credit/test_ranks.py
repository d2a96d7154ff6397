"""Methods that look at the whole batch look at that of all ranks: two processes give what one gives."""

from datetime import timedelta

import pytest
import torch

from grail_lightning.credit import (
    DGPO,
    GRAIL,
    LESS,
    PRIME,
    RLSD,
    UCAS,
    AdvantageReweighting,
    AttentionRhythm,
    HighEntropy,
    OARGradient,
    OptimalBaseline,
    Oracle,
    PrefixWeights,
    Product,
    Resampled,
    TokenCredit,
    TokenWeights,
    TreeAdvantage,
    WarmUp,
)
from grail_lightning.step.report import Tally, add_credit
from tests.credit.rollouts import ByText, context, elsewhere, in_groups, second_model
from tests.tolerance import assert_near


class Longest(TokenCredit):
    """Of a user's: a figure of its own is the mean over this rank's rows."""

    def __call__(self, policy, batch, context):
        lengths = batch.response_lengths.double()
        fallback = torch.zeros(len(batch), dtype=torch.bool)
        metrics = {"length": lengths.mean().item()}
        return TokenWeights(values=batch.response_mask.double(), fallback=fallback, metrics=metrics)


METHODS = [
    HighEntropy,
    UCAS,
    LESS,
    AdvantageReweighting,
    RLSD,
    GRAIL,
    OARGradient,
    lambda: TreeAdvantage(outcome="correctness"),
    PrefixWeights,
    OptimalBaseline,
    DGPO,
    AttentionRhythm,
    lambda: PRIME(double_forward=True),
    lambda: Oracle("balanced"),
    lambda: Resampled(borders="entropy", gate="all"),
    Longest,
    lambda: WarmUp(Product(GRAIL(), UCAS())),
]


def credit_figures(batch, weights):
    """What is logged of the weights, over all ranks."""
    tally = Tally()
    add_credit(tally, batch, weights, None)
    return tally.compute()


# One group of two rows, and two groups.
SHARES = [torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])]
FIGURES = {"eligible", "self_certainty", "shared_tokens", "length", "teacher_share", "entropy_threshold"}
FIGURES |= {
    "in_tree",
    "remembered",
    "gradient_energy",
    "reference_distance",
    "attention_lookback",
    "continued_tokens",
    "divided",
    "filtered",
    "reward_model_loss",
    "reward_model_accuracy",
    "reward_model_grad_norm",
}


def given(policy, frozen, **options):
    """All that a method may ask for."""
    return context(reference=frozen, continuations=ByText(), second=second_model(policy), **options)


def _one_rank(rank, folder, policy, frozen, batch):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mine = batch.select(SHARES[rank])
    # Ranks differ in their number of micro-batches.
    budget = 300 if rank else 5000
    found = [method()(policy, mine, given(policy, frozen, budget=budget)) for method in METHODS]
    reports = [credit_figures(mine, weights) for weights in found]
    torch.save(([(weights.values, weights.additive) for weights in found], reports), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_of_different_size_give_the_weights_and_figures_of_one(golden_policy, golden_batch, tmp_path):
    batch = in_groups(golden_batch).replace(group=torch.tensor([0, 0, 1, 1, 2, 2]))
    frozen = elsewhere(golden_policy)
    # Forked: the policy is already there.
    torch.multiprocessing.start_processes(
        _one_rank, args=(tmp_path, golden_policy, frozen, batch), nprocs=2, start_method="fork"
    )
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    named = set()
    for k, method in enumerate(METHODS):
        whole = method()(golden_policy, batch, given(golden_policy, frozen))
        expected = credit_figures(batch, whole)
        named |= {name.removeprefix("credit/") for name in expected}
        for _, reports in results:
            assert reports[k] == pytest.approx(expected, rel=1e-6)
        for rank, rows in enumerate(SHARES):
            width = int(batch.response_lengths[rows].max())
            for found, expected in zip(results[rank][0][k], (whole.values, whole.additive), strict=True):
                assert (found is None) == (expected is None)
                if found is not None:
                    assert_near(found, expected[rows, :width], 64, torch.float32)
    assert named >= FIGURES
    alone = HighEntropy()(golden_policy, batch.select(SHARES[0]), context()).values
    assert not torch.equal(alone, results[0][0][0][0]), "a rank by itself has another threshold"
