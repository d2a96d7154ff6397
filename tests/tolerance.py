"""How near two computations of one figure must come: a number of roundings, at the scale of what is compared.

Processors and shapes have kernels of their own, and each sums in an order of its own. The difference is a multiple of
the dtype's epsilon times the size of what was summed; an absolute number that holds on one machine means nothing on
another.
"""

import pytest
import torch


def roundings(number, dtype=torch.float64, scale=1.0):
    """What `number` roundings in `dtype` amount to, of figures as large as `scale`."""
    return number * torch.finfo(dtype).eps * float(scale)


def near(expected, number, dtype=torch.float64, scale=0.0):
    """Equal to a figure, a list or a dict within `number` roundings of each; small figures are taken to be `scale`."""
    return pytest.approx(expected, rel=roundings(number, dtype), abs=roundings(number, dtype, scale))


def assert_near(found, expected, number, dtype=None, scale=None):
    """No entry differs by more than `number` roundings at the largest expected one, or at `scale`.

    `dtype` is the one that was computed in, where that is coarser than the one of the tensors.
    """
    dtype = dtype or max(found.dtype, expected.dtype, key=lambda kind: torch.finfo(kind).eps)
    scale = expected.detach().abs().max() if scale is None else scale
    torch.testing.assert_close(found, expected, rtol=0, atol=roundings(number, dtype, scale))
