"""A server that runs programs in SandboxFusion's form, played by a server on this machine that starts Python."""

import subprocess
import sys

import pytest

from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.isolation import Server
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, TestCall, Tests
from tests.http_server import server
from tests.shell import fails_early

CALLS = Tests(entry="f", calls=tuple(TestCall((n,), n * n) for n in range(3)))
ASSERTIONS = Tests(
    entry="f", assertions=("assert f(2) == 4 and f(3) == 9", "assert f(4) == 16"), preamble="import math"
)
LIMITS = ProgramLimits(seconds=0.5)
LATE = 200, {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}}


def run(body, _):
    """The programs are those of this file, which harm nobody."""
    assert (body["language"], body["memory_limit_MB"]) == ("python", 256 + 64)
    assert body["run_timeout"] in (3 * LIMITS.seconds + 1, 31), "the second one asks whether there is a server"
    made = subprocess.run([sys.executable, "-I", "-c", body["code"]], capture_output=True, text=True)
    result = {"status": "Finished", "return_code": made.returncode, "stdout": made.stdout, "stderr": made.stderr}
    return 200, {"status": "Failed" if made.returncode else "Success", "message": "", "run_result": result}


@pytest.fixture(scope="module")
def remote():
    with server(run) as (url, _):
        executor = Executor(Server(f"{url}/run_code"), LIMITS)
        yield executor
        executor.close()


def test_outcomes_are_those_of_a_sandbox_of_this_machine(remote, programs_run):
    keeps = "seen = []\ndef f(n):\n    seen.append(n)\n    return n * n * (len(seen) < 3)"
    jobs = [
        Job("def f(n):\n    print('noise')\n    return n * n", CALLS),
        Job("def f(n):\n    print('noise')\n    return n * n", CALLS, 1),
        Job(keeps, CALLS),
        Job(keeps, ASSERTIONS),
        Job("import random\ndef f(n): return random.random()", CALLS),
        Job("def f(n:", ASSERTIONS),
        Job("def g(n): return 1", CALLS),
        Job("def f(n): return {}[n] if n == 2 else n * n", CALLS),
        Job("def f(n): return {}[n] if n == 4 else n * n", ASSERTIONS, 1),
    ]
    local = Executor(limits=LIMITS)
    assert remote.run_many(jobs) == local.run_many(jobs)
    local.close()


def test_a_program_that_ends_in_another_way_has_a_verdict(remote):
    crashes = "import os\ndef f(n): os._exit(3)"
    says_nothing = "import sys\ndef f(n):\n    sys.__stdout__.write('no reply')\n    sys.__stdout__.flush()"
    outcomes = remote.run_many([Job(crashes, CALLS), Job(says_nothing, CALLS)])
    assert [outcome.status for outcome in outcomes] == ["crashed", "failed"]
    assert remote.printed("print(6 * 7)") == "42\n"


def test_a_server_that_fails_for_a_moment_is_asked_again(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers = {3: (500, b""), 4: (200, b"[]"), 5: (200, {"status": "SandboxError", "message": "full"}), 10: LATE}
    with server(lambda body, n: answers.get(n) or run(body, n)) as (url, asked):
        executor = Executor(Server(url), LIMITS)
        assert executor.run("def f(n): return n * n", CALLS).status == "passed"
        assert len(asked) == 2 + 3 + 4
        late = executor.run("def f(n):\n    while True: pass", CALLS)
        assert (late.status, late.certain) == ("timeout", False)
        executor.close()
    with pytest.raises(RuntimeError, match=r"does not start any more: http://.* did not answer"):
        executor.run("def f(n): return n", CALLS)


def test_an_address_without_a_server_is_one_line_before_a_model_is_loaded(monkeypatch, capsys, empty_folder):
    monkeypatch.setattr("time.sleep", lambda _: None)
    url = "http://127.0.0.1:9/run_code"
    options = ["--data.task.isolation=Server", f"--data.task.isolation.url={url}"]
    said = fails_early(capsys, "fit", "--config=configs/quickstart_code.yaml", *options)
    assert f"Nothing isolates programs here (Server: {url} did not answer (Connection refused))" in said
