"""Bytes of living tensors, counted at each operation."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grail_lightning.plan.live import Live


def test_a_tensor_counts_until_it_is_freed():
    with Live() as live:
        first = torch.zeros(1000)  # 4,000 bytes
        second = first + 1
        assert live.now == 8000
        del first
        third = torch.zeros(10, dtype=torch.float64)
        assert live.now == 4000 + 80
        del second, third
    assert (live.now, live.peak) == (0, 8000)


def test_views_and_operations_in_place_count_nothing():
    outside = torch.zeros(1000)
    with Live() as live:
        outside.add_(1)
        outside.view(10, 100)[0].t()
        torch.add(outside, 1, out=outside)
    assert live.peak == 0


def test_what_a_backward_pass_needs_is_counted():
    leaf = torch.ones(1000, requires_grad=True)
    with Live() as live:
        root = leaf.exp().exp()  # Each result is needed to differentiate it.
        assert live.now == 8000
        root.sum().backward()
        del root
        assert live.now == 4000, "the gradient"


def test_tensors_without_data_count_as_those_with_data():
    def run():
        with Live() as live:
            matrix = torch.ones(30, 40, requires_grad=True)
            (matrix @ torch.ones(40, 50)).relu().sum().backward()
        return live.peak

    with FakeTensorMode():
        without = run()
    assert without == run() > 4 * (30 * 40 + 40 * 50 + 2 * 30 * 50)
