import math
from fractions import Fraction

import pytest
import torch

from grail_lightning.core.functional.credit_measures import ess_ratio, fork_wins, forks, top_mass, top_share


def test_uniform_credit_has_an_effective_sample_size_of_the_whole_row():
    mask = torch.tensor([[True, True, True, False]])
    assert ess_ratio(torch.full((1, 4), -0.3), mask).item() == pytest.approx(1.0)
    # one token of three carries all: 1 / 3
    assert ess_ratio(torch.tensor([[0.0, 2.0, 0.0, 9.0]]), mask).item() == pytest.approx(1 / 3)
    assert ess_ratio(torch.zeros(1, 4), mask).isnan().all()


def test_top_mass_rounds_the_number_of_tokens_up():
    credit = torch.tensor([[1.0] * 10 + [10.0]])
    # ceil(0.1 · 11) = 2 tokens: (10 + 1) / 20
    assert top_mass(credit, torch.ones(1, 11, dtype=torch.bool)).item() == pytest.approx(11 / 20)


def test_forks_are_pairs_of_rows_that_part_at_a_result():
    """Rows begin 5 and go on 1 | 2 | 3; row 3 parts before the result, row 4 is of another group."""
    nodes = torch.tensor([[0, 1, 4], [0, 2, -1], [0, 3, 5], [6, 7, 8], [9, 10, 11]])
    group = torch.tensor([0, 0, 0, 0, 1])
    flawed, sound = torch.zeros(2, 5, 3, dtype=torch.bool)
    flawed[0, 1] = flawed[4, 1] = True
    sound[1, 1] = sound[2, 1] = sound[3, 1] = True
    found = forks(nodes, group, flawed, sound)
    assert torch.stack(found).T.tolist() == [[0, 1, 1], [0, 2, 1]]
    padded = (
        torch.nn.functional.pad(nodes, (0, 2), value=-1),
        group,
        *(torch.nn.functional.pad(result, (0, 2)) for result in (flawed, sound)),
    )
    assert all(map(torch.equal, forks(*padded), found)), "padding is no token that rows have in common"
    scores = torch.tensor([[0.0, 2.0, 0.0], [0.0, 2.0, 9.0], [0.0, 1.0, 9.0], [9.0] * 3, [9.0] * 3])
    assert fork_wins(scores, *found).tolist() == [0.5, 1.0]
    # The result of row 1 may go on where that of row 0 ends: both are `1` and `12`, with token 0 in common.
    flawed[0], sound[1], sound[2] = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    assert torch.stack(forks(nodes, group, flawed, sound)).T.tolist() == [[0, 1, 1]]
    assert len(fork_wins(scores, *forks(nodes, group, sound & False, sound))) == 0


def test_rows_may_part_at_their_first_token():
    nodes, results = torch.tensor([[0], [1], [2]]), torch.tensor([[True], [True], [True]])
    group = torch.tensor([4, 4, 5])
    found = forks(nodes, group, results & torch.tensor([[1], [0], [0]]).bool(), results)
    assert torch.stack(found).T.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("share", [0.0, 0.07, 0.29, 0.3, 1 / 3, 1e-05, 0.999, 1.0, 1])
def test_a_share_of_the_tokens_is_that_of_the_number_as_written(share):
    """A third of ten tokens is four, but 0.3 of them is three: as fractions, at every length."""
    lengths = torch.arange(300 + 1)
    mask = torch.arange(300) < lengths[:, None]
    expected = [math.ceil(Fraction(str(share)) * n) for n in range(300 + 1)]
    assert top_share(torch.zeros(mask.shape), mask, share).sum(1).tolist() == expected
    if expected[-1]:  # Of equal credits the mass is the number of tokens.
        mass = top_mass(torch.ones(mask.shape), mask, share)[1:] * lengths[1:]
        assert mass.round().long().tolist() == expected[1:]


def test_the_largest_scores_are_taken_and_of_equal_ones_the_earlier():
    scores, mask = (
        torch.tensor([[1.0, 3.0, 2.0, 3.0, 9.0], [5.0] * 5]),
        torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]),
    )
    # ceil(0.5 · 4) = 2
    assert top_share(scores, mask.bool(), 0.5).int().tolist() == [[0, 1, 0, 1, 0], [0, 1, 1, 0, 0]]
