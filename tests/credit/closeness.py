"""How golden tensors are compared: see tests/golden/README.md."""


def golden_error(found, golden, mask):
    """The largest difference on valid tokens, as a share of its row's maximum."""
    scale = (golden.abs() * mask).amax(1, keepdim=True).clamp(min=1e-30)
    return ((found - golden).abs() / scale)[mask].max().item()
