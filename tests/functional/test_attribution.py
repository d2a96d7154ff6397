import pytest
import torch

from grail_lightning.functional.attribution import ess_ratio, pairwise_auroc, top_mass


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


def test_auroc_counts_pairs_and_half_of_ties():
    scores = torch.tensor([[3.0, 1.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    positive = torch.tensor([[True, True, False, False], [False] * 4])
    negative = torch.tensor([[False, False, True, True], [True] * 4])
    # pairs: (3,2) 1, (3,1) 1, (1,2) 0, (1,1) ½ -> 2.5 / 4
    found = pairwise_auroc(scores, positive, negative)
    assert found[0].item() == 0.625
    assert found[1].isnan()
