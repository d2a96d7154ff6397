"""What the tests of several credit methods begin with."""

import pytest

from tests.core.credit.rollouts import elsewhere, in_groups


@pytest.fixture(scope="module")
def batch(golden_batch):
    """The golden rows in two groups."""
    return in_groups(golden_batch)


@pytest.fixture(scope="module")
def reference(golden_policy):
    """A policy with other weights."""
    return elsewhere(golden_policy)
