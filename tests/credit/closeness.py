"""How golden tensors are compared: see tests/golden/README.md.

``pytest -s tests/credit -k golden`` prints the largest differences.
"""

import os


def golden_error(found, golden, mask):
    """The largest difference on valid tokens, as a share of its row's maximum."""
    scale = (golden.abs() * mask).amax(1, keepdim=True).clamp(min=1e-30)
    share, largest = ((found - golden).abs() / scale)[mask].max().item(), (found - golden).abs()[mask].max().item()
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].removesuffix(" (call)")
    print(f"\ngolden: {name}: largest difference {largest:.1e}, as a share of the row's maximum {share:.1e}")
    return share
