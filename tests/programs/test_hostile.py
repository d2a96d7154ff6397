"""Programs that attack the grader, in each back end that runs here."""

import os
import sysconfig
import time
from pathlib import Path

import pytest

import grail_lightning.programs.grade
from grail_lightning.programs.outcome import Call, Job, Tests
from tests.programs.hostile import HOSTILE

TESTS = Tests(entry="f", calls=(Call((3,), 4),))
ADDS_ONE = "def f(x): return x + 1"


def _sandboxes(pid):
    """The commands of the sandboxes' processes below a process: they hold the text of the guest."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    return [command for command in commands if b"_CONNECTION" in command or b"wasm_host" in command]


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    file = tmp_path_factory.mktemp("canary") / "canary"
    file.write_text("sings")
    return file


@pytest.fixture(scope="module")
def outcomes(executor, canary):
    """All of them in one go, with the processes that were there before and after."""
    base_packages = Path(sysconfig.get_path("stdlib"), "site-packages")
    words = {
        "{grader}": grail_lightning.programs.grade.__file__,
        "{canary}": str(canary),
        "{package}": pytest.__file__,
        "{base_package}": str(next(base_packages.glob("*/__init__.py"), pytest.__file__)),
        "{home}": str(Path.home()),
        "{nested}": "[" * 5000 + "]" * 5000,
    }
    sources = {name: source for name, (source, _) in HOSTILE.items()}
    for word, value in words.items():
        sources = {name: source.replace(word, value) for name, source in sources.items()}
    begin = time.monotonic()
    found = executor.run_many([Job(source, TESTS) for source in sources.values()])
    return dict(zip(sources, found, strict=True)), time.monotonic() - begin


def test_there_are_many():
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_no_attack_succeeds(outcomes, name):
    outcome = outcomes[0][name]
    assert outcome.status in HOSTILE[name][1] - {"passed"}, outcome
    assert outcome.passed == (False,)
    assert outcome.failing == 0
    assert outcome.message.isprintable()
    assert len(outcome.message) <= 300


def test_none_holds_the_grader_longer_than_its_limit(executor, outcomes):
    wall = 3 * executor.limits.seconds + 1
    # Two at a time; a new sandbox takes a while on a busy machine.
    assert outcomes[1] < len(HOSTILE) * (wall + 3) / 2


def test_nothing_was_written_the_pool_goes_on_and_nothing_is_left(executor, outcomes, canary):
    assert canary.read_text() == "sings"
    assert not Path("left").exists()
    assert not [folder for folder in ("/tmp/left", "/tmp/d") if Path(folder).exists()]
    programs = [Job(f"{ADDS_ONE}  # {index}", TESTS) for index in range(20)]
    assert {outcome.status for outcome in executor.run_many(programs)} == {"passed"}
    assert _sandboxes(os.getpid())
    executor.close()
    assert not _sandboxes(os.getpid())
