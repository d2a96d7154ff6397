"""How golden tensors are compared: see tests/golden/README.md."""


def close_to_golden(found, golden, mask, rtol=1e-5):
    """Within `rtol` of each row's maximum, on valid tokens."""
    scale = (golden.abs() * mask).amax(1, keepdim=True).clamp(min=1e-30)
    error = ((found - golden).abs() / scale)[mask].max().item()
    assert error < rtol, error
