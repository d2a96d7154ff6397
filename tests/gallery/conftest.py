"""What the tests of several credit methods begin with, here as for those of the core."""

from tests.core.credit.conftest import batch, reference  # noqa: F401
