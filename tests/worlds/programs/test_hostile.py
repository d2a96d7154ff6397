"""Programs that attack the grader, in each sandbox that runs here."""

import sysconfig
import time
from pathlib import Path

import pytest

import grail_lightning.worlds.programs.grade
from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, TestCall, Tests
from tests.worlds.programs.hostile import HOSTILE

TESTS = Tests(entry="f", calls=(TestCall((3,), 4),))
WORKERS = 6  # Many of the programs wait.


def _sandboxes():
    """The sandboxes' processes below this one: their commands hold the text of the guest."""
    children = {
        Path("/proc", child)
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    }
    commands = {child: (child / "cmdline").read_bytes() for child in children}
    return {child for child, command in commands.items() if b"_CONNECTION" in command}


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    file = tmp_path_factory.mktemp("canary") / "canary"
    file.write_text("sings")
    return file


@pytest.fixture(scope="module")
def attacked(executor):
    """An executor of its own: half of the time is enough for all but those that never end."""
    made = Executor(executor.isolation, ProgramLimits(seconds=0.25, memory_mb=128, output_kb=16), workers=WORKERS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def outcomes(attacked, canary):
    """All of them in one go, the seconds that they took, and the processes that were there before."""
    base_packages = Path(sysconfig.get_path("stdlib"), "site-packages")
    words = {
        "{grader}": grail_lightning.worlds.programs.grade.__file__,
        "{canary}": str(canary),
        "{package}": pytest.__file__,
        "{base_package}": str(next(base_packages.glob("*/__init__.py"), pytest.__file__)),
        "{home}": str(Path.home()),
        "{nested}": "[" * 5000 + "]" * 5000,
    }
    sources = {name: source for name, (source, _) in HOSTILE.items()}
    for word, value in words.items():
        sources = {name: source.replace(word, value) for name, source in sources.items()}
    before, begin = _sandboxes(), time.monotonic()
    found = attacked.run_many([Job(source, TESTS) for source in sources.values()])
    return dict(zip(sources, found, strict=True)), time.monotonic() - begin, before


@pytest.mark.parametrize("name", HOSTILE)
def test_no_attack_succeeds(outcomes, name):
    outcome = outcomes[0][name]
    assert outcome.status in HOSTILE[name][1] - {"passed"}, outcome
    assert (outcome.passed, outcome.failing) == ((False,), 0)
    assert outcome.message.isprintable()
    assert len(outcome.message) <= 300


def test_none_holds_the_grader_nothing_is_written_and_nothing_is_left(attacked, outcomes, canary):
    assert len(outcomes[0]) > 120
    # A new sandbox takes a while on a busy machine.
    wall = 3 * attacked.limits.seconds + 1
    assert outcomes[1] < len(HOSTILE) * (wall + 3) / 2
    assert canary.read_text() == "sings"
    assert not [folder for folder in ("left", "/tmp/left", "/tmp/d") if Path(folder).exists()]
    programs = [Job(f"def f(x): return x + 1  # {index}", TESTS) for index in range(20)]
    assert {outcome.status for outcome in attacked.run_many(programs)} == {"passed"}
    assert _sandboxes() > outcomes[2]
    attacked.close()
    assert _sandboxes() <= outcomes[2]
