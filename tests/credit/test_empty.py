"""A rank without rollouts, as the last batch of `predict` may leave it, for every credit method and control."""

import inspect
from datetime import timedelta

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.credit import (
    GRAIL,
    UCAS,
    CreditControl,
    HighEntropy,
    PermutedRewards,
    Product,
    Resampled,
    SameMagnitude,
    TokenCredit,
    Uniform,
    WarmUp,
)
from grail_lightning.credit.weigh import check_weights
from grail_lightning.step.assign import token_weights
from tests.credit.rollouts import ByText, context, elsewhere, second_model

# Those whose constructors need arguments, or that look at the whole batch only with some.
ARGUMENTS = {
    WarmUp: lambda: WarmUp(UCAS()),
    Product: lambda: Product(GRAIL(), HighEntropy()),
    PermutedRewards: lambda: PermutedRewards(UCAS()),
    Resampled: lambda: Resampled(borders="entropy", gate="all"),
}
EXPORTED = [getattr(credits, name) for name in credits.__all__]
KINDS = [
    made
    for made in EXPORTED
    if inspect.isclass(made) and issubclass(made, (TokenCredit, CreditControl)) and not inspect.isabstract(made)
]


def _weights(kind, policy, batch, given):
    made = ARGUMENTS.get(kind, kind)()
    pair = (made, None) if isinstance(made, TokenCredit) else (GRAIL(gate="all"), made)
    return token_weights(*pair, policy, batch, given)


def _given(policy, frozen):
    """All that a method may ask for."""
    return context(reference=frozen, continuations=ByText(), second=second_model(policy))


def test_every_exported_method_and_control_is_among_those_tested():
    assert {Uniform, GRAIL, SameMagnitude, *ARGUMENTS} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_batch_without_rows_has_weights_without_rows(kind, golden_policy, batch, reference):
    none = batch.select(torch.tensor([], dtype=torch.long))
    weights = _weights(kind, golden_policy, none, _given(golden_policy, reference))
    assert weights.values.shape == (0, 0)
    check_weights(kind, weights, none)


def _one_rank(rank, folder, policy, frozen, batch):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mine = batch.select(torch.tensor([], dtype=torch.long)) if rank else batch
    found = [_weights(kind, policy, mine, _given(policy, frozen)) for kind in KINDS]
    torch.save([(weights.values, weights.additive) for weights in found], folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_rank_without_rollouts_changes_no_weight_of_another_and_joins_its_collectives(golden_policy, batch, tmp_path):
    frozen = elsewhere(golden_policy)
    torch.multiprocessing.start_processes(
        _one_rank, args=(tmp_path, golden_policy, frozen, batch), nprocs=2, start_method="fork"
    )
    ours, theirs = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for kind, found, (empty, _) in zip(KINDS, ours, theirs, strict=True):
        alone = _weights(kind, golden_policy, batch, _given(golden_policy, frozen))
        assert empty.shape == (0, 0), kind.__name__
        for weights, expected in zip(found, (alone.values, alone.additive), strict=True):
            assert (weights is None) == (expected is None), kind.__name__
            assert weights is None or torch.equal(weights, expected), kind.__name__
