"""How programs are isolated is an option: classes of the package by their names, others by their import paths."""

import pickle
import re

import pytest

from grail_lightning.app.cli.app import FitOptions
from grail_lightning.worlds.code.python import Python
from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.isolation import Bubblewrap, Sandlock, Server
from grail_lightning.worlds.programs.outcome import TestCall, Tests
from grail_lightning.worlds.programs.probe import refusal
from tests.shell import fails_early, main
from tests.worlds.programs.isolations import Behind, Counted, Counting, Numbered

CODE, PYTHON = "--config=configs/quickstart_code.yaml", "--config=configs/smollm2_python.yaml"
TESTS = Tests("f", (TestCall((3,), 4),))


@pytest.fixture
def bubblewrap():
    """Skips a test where namespaces cannot be had."""
    if reason := refusal(Bubblewrap()):
        pytest.skip(f"bubblewrap does not run programs here ({reason}); docs/reference/sandbox.md says what it needs")


def parsed(*arguments):
    """The options of the task."""
    return FitOptions().parse([*arguments]).data.init_args.task.init_args


@pytest.mark.parametrize(
    ("isolation", "config"), [("data.task.isolation", CODE), ("data.task.environment.isolation", PYTHON)]
)
def test_an_isolation_is_named_and_another_one_begins_with_its_own_options(isolation, config):
    def held(*given):
        task = parsed(config, *given)
        made = task.environment.init_args.isolation if "environment" in isolation else task.isolation
        return made and (made.class_path.rpartition(".")[2], vars(made.get("init_args") or made.__class__()))

    server = [f"--{isolation}=Server", f"--{isolation}.url=http://127.0.0.1:9/run_code"]
    assert held() is None
    assert held(f"--{isolation}=Sandlock") == ("Sandlock", {})
    assert held(*server) == ("Server", {"url": "http://127.0.0.1:9/run_code"})
    assert held(*server, f"--{isolation}=Bubblewrap") == ("Bubblewrap", {})
    assert held(f"--{isolation}=tests.worlds.programs.isolations.Numbered", f"--{isolation}.number=3") == (
        "Numbered",
        {"number": 3},
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["isolation=bubblewrap"], "must be one of Bubblewrap, Sandlock, Server, or the import path of a class, but"),
        (
            ["isolation=Server"],
            "`data.task.isolation.url` must be given, because Server of `data.task.isolation`",
        ),
        (["isolation=Server", "isolation.url=127.0.0.1"], "`isolation.url` must be an address such as http://"),
        (["backend=auto"], "There is no option `data.task.backend`. Here it is `data.task.isolation`. Write null"),
        (
            ["isolation=tests.worlds.programs.isolations.Changeable"],
            r"hashable, but got Changeable\(cores=1\). Make",
        ),
        (
            ["isolation=tests.worlds.programs.isolations.Bare"],
            r"\(Bare: it does not isolate: .*read .*secret.*read /etc/pass",
        ),
        (["isolation=tests.worlds.programs.isolations.Behind"], r"\(Behind: .*No such file .* 'no-such-command'\)"),
    ],
)
def test_an_isolation_that_cannot_be_used_is_one_line_before_a_model_is_loaded(options, told, capsys, empty_folder):
    said = fails_early(capsys, "fit", CODE, *(f"--data.task.{option}" for option in options))
    assert re.search(told, said), said


def test_a_sandbox_of_ones_own_runs_the_programs_of_a_run(bubblewrap, empty_folder):
    """By its import path alone, and each of them: those of the references before training, and those of rollouts."""
    before = Counting.programs
    small = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"]
    small += ["--data.num_train=16", "--data.num_val=4", "--data.prompts_per_batch=2", "--model.execution.group_size=4"]
    small += ["--model.execution.mini_batches=1", "--pictures.every_n_batches=0"]
    main(["fit", CODE, *small, "--data.task.isolation=tests.worlds.programs.isolations.Counted"])
    assert Counting.programs > before + 16


def test_isolations_with_the_same_options_are_one(bubblewrap):
    assert Bubblewrap() == Bubblewrap() != Sandlock()
    assert Server("http://a/b") == Server("http://a/b") != Server("http://a/c")
    assert Numbered() == Numbered(1) != Numbered(2)
    assert len({Numbered(1), Numbered(1), Numbered(2), Bubblewrap(), Bubblewrap(), Counted()}) == 4
    one, same, other = Python(Numbered(1)), Python(Numbered(1)), Python(Numbered(2))
    assert one._executor is same._executor is not other._executor, "rollouts share processes"
    executor = pickle.loads(pickle.dumps(Executor(Numbered(5))))
    assert executor.isolation == Numbered(5)
    assert executor.run("def f(x): return x + 1", TESTS).status == "passed"
    executor.close()


def test_a_command_that_goes_missing_ends_the_run_with_its_name(tmp_path):
    executor = Executor(workers=1)
    executor.isolation = Behind(str(tmp_path / "gone"))
    with pytest.raises(RuntimeError, match=r"The sandbox Behind does not start any more: .*No such file.*gone"):
        executor.run("def f(x): return x + 1", TESTS)
    executor.close()
