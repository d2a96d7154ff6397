import pytest

from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.outcome import ProgramLimits
from grail_lightning.worlds.programs.probe import LOCAL, refusal


@pytest.fixture(scope="session", params=LOCAL, ids=lambda isolation: type(isolation).__name__)
def executor(request):
    """An executor of each way to isolate that isolates on this machine, with short limits."""
    if reason := refusal(request.param):
        pytest.skip(f"{request.param} does not run programs here ({reason}); see docs/reference/sandbox.md")
    executor = Executor(request.param, ProgramLimits(seconds=0.5, memory_mb=128, output_kb=16))
    yield executor
    executor.close()
