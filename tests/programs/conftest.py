import pytest

from grail_lightning.programs.executor import Executor, refusal
from grail_lightning.programs.outcome import Limits

BACKENDS = ["bubblewrap", "sandlock"]


@pytest.fixture(scope="session", params=BACKENDS)
def executor(request):
    """An executor of each back end that isolates on this machine, with short limits."""
    if reason := refusal(request.param):
        pytest.skip(f"{request.param} does not run programs here ({reason}); docs/sandbox.md says what it needs")
    executor = Executor(request.param, Limits(seconds=0.5, memory_mb=128, output_kb=16))
    yield executor
    executor.close()
