"""Two nodes of one process each, started by `torchrun` on this machine: they train together, and one may die."""

import signal
from functools import cache

import pytest
import torch

from tests.nodes import go_on, nodes, strike, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns the weights of an undisturbed run with a strategy."""

    @cache
    def of(strategy):
        folder = tmp_path_factory.mktemp("undisturbed")
        with nodes(folder, strategy) as both:
            assert both.wait(300) == [0, 0], both.said(0)[-3000:] + both.said(1)[-3000:]
        return weights(folder)

    return of


# As a kernel that is short of memory ends a process.
@pytest.mark.parametrize(
    ("victim", "how", "strategy"),
    [
        (1, signal.SIGKILL, "ddp"),
        (0, signal.SIGKILL, "ddp"),
        (1, signal.SIGKILL, "ModelParallelStrategy"),
    ],
)
def test_the_others_end_within_a_minute_and_a_restart_ends_with_the_weights_of_an_undisturbed_run(
    undisturbed, victim, how, strategy, tmp_path
):
    strategy = f"--trainer.strategy={strategy}"
    expected = undisturbed(strategy)
    ended = strike(tmp_path, victim, how, strategy)
    resumed = go_on(tmp_path, strategy)
    found = weights(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    print(f"\n{strategy} {how.name} to rank {victim}: {ended:.1f} s to the end, {resumed:.1f} s to go on")


def test_an_error_of_one_rank_ends_all(tmp_path):
    with nodes(tmp_path, "--trainer.strategy=ddp", "--model.engine=tests.failing.Failing") as both:
        assert 0 not in both.wait(240)
        assert "this share of the batch is wrong" in both.said(1)
