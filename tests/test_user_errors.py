"""Code of the user's that raises what ends a process, an epoch or a validation without a message."""

import asyncio
import re
import sys
import threading

import lightning.pytorch as pl
import pytest
import torch

from grail_lightning import ArithmeticTask, EnvironmentTask, HFEngine, PromptData, default_callbacks
from grail_lightning.answers import Verdict
from grail_lightning.core.data.loaders import PromptSet
from grail_lightning.core.runtime.guard import explained
from grail_lightning.core.runtime.hooks import GuardedHooks
from grail_lightning.credit import CreditControl, Uniform
from tests.runs import batches, module, trainer
from tests.shell import SHORT, fails

KINDS = [SystemExit(0), asyncio.CancelledError(), GeneratorExit("closed"), StopIteration(3), BaseException("own")]


def gives_up(error):
    raise error


class Reward:
    def __init__(self, error):
        self.error = error

    def __call__(self, responses, references):
        gives_up(self.error)


class AsyncReward(Reward):
    async def __call__(self, responses, references):
        await asyncio.sleep(0)
        gives_up(self.error)


class Gathered(Reward):
    """As most that ask a server: a task for each response, whose `SystemExit` leaves the event loop."""

    async def __call__(self, responses, references):
        async def one():
            gives_up(self.error)

        return await asyncio.gather(*(one() for _ in responses))


class Credit(Uniform):
    def __init__(self, error):
        self.error = error

    def __call__(self, policy, batch, context):
        gives_up(self.error)


class Control(CreditControl):
    def __init__(self, error):
        self.error = error

    def __call__(self, weights, batch, context):
        gives_up(self.error)


class Engine(HFEngine):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def generate(self, *arguments):
        gives_up(self.error)


class Task(ArithmeticTask):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def answer(self, text):
        gives_up(self.error)


class Callback(pl.Callback):
    def __init__(self, error, hook="on_train_batch_end"):
        self.error = error
        setattr(self, hook, lambda *_, **__: gives_up(self.error))


def prompts(task, number=2):
    made = [task.prompt({"problem": "1+2"}) for _ in range(2)]
    return torch.utils.data.DataLoader([made] * number, batch_size=None)


def fit(where, error, **changes):
    """A run in which code of the user's raises the error."""
    options, callbacks, data = {}, [], batches(2, size=2)
    match where:
        case "reward":
            data = prompts(ArithmeticTask(rewards=[Reward(error)]))
        case "task":
            data = prompts(Task(error))
        case "credit" | "control" | "engine":
            options = {where: {"credit": Credit, "control": Control, "engine": Engine}[where](error)}
        case "callback":
            callbacks = [Callback(error)]
        case "loader":
            data = torch.utils.data.DataLoader(Cursed(error), batch_size=None)
    trainer(2, *callbacks, **changes).fit(module(**options), data)


class Cursed(torch.utils.data.IterableDataset):
    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield from batches(1, size=2)
        gives_up(self.error)


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_what_ends_a_process_or_a_loop_is_an_error_with_its_place(error):
    hooks = GuardedHooks(pl.profilers.PassThroughProfiler())
    with (
        pytest.raises(
            ValueError, match=r"^`Mine.on_fit_end` must not raise what ends a run .* in `gives_up` \(test_us"
        ),
        hooks.profile("[Callback]Mine{'every': 2.5}.on_fit_end"),
    ):
        gives_up(error)


class Data(PromptData):
    """A data module with a hook that raises."""

    def __init__(self, hook, error):
        super().__init__(prompts_per_batch=2, eval_prompts_per_batch=2)
        setattr(self, hook, lambda *_, **__: gives_up(error))

    def load(self, split):
        task = ArithmeticTask()
        return [PromptSet("sums", [task.prompt({"problem": f"{k}+2"}) for k in range(4)])]


CALLBACK_HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


@pytest.mark.parametrize("error", [SystemExit(0), StopIteration(3)], ids=["exit", "stop"])
@pytest.mark.parametrize(
    ("part", "hook"),
    [
        *(("callback", hook) for hook in CALLBACK_HOOKS),
        *(("data", hook) for hook in ("prepare_data", "setup", "load", "teardown")),
    ],
)
def test_no_hook_of_a_run_from_python_ends_it_without_a_message(part, hook, error):
    given = Callback(error, hook) if part == "callback" else Data(hook, error)
    data = {"datamodule": given if part == "data" else Data("unused", error)}
    callbacks = [given] if part == "callback" else []
    made = trainer(2, *callbacks, val_check_interval=1, num_sanity_val_steps=1)
    with pytest.raises(
        ValueError, match=rf"must not raise .* raised {type(error).__name__}: . in `gives_up` \(test_us"
    ):
        made.fit(module(), **data)


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", [Reward, AsyncReward, Gathered])
def test_a_reward_that_raises_it_is_named(kind, error):
    """`SystemExit` in an `async` one ended the thread of its event loop, so that the run waited for ever."""
    if kind is not Reward and isinstance(error, StopIteration):
        error = RuntimeError("no coroutine can raise it")
    task = ArithmeticTask(rewards=[kind(error)])
    asked = [task.prompt({"problem": "1+2"})]
    verdict = Verdict(correct=True, status="right", layer="number", gold="3", prediction="3")
    for _ in range(2):  # The loop is still there.
        with pytest.raises(
            ValueError, match=rf"^The reward `{kind.__name__} given in .* raised {type(error).__name__}"
        ):
            task.earn(["3"], asked, [verdict], [1])


@pytest.mark.parametrize("error", [SystemExit(0), StopIteration(3)], ids=["exit", "stop"])
@pytest.mark.parametrize(("where", "named"), [("callback", "Callback.on_train_batch_end"), ("credit", "training_step")])
def test_a_run_ends_with_the_error_and_not_with_an_epoch_or_the_process(where, named, error):
    """Lightning takes a `StopIteration` for the end of an epoch, or drops it and goes on."""
    with pytest.raises(ValueError, match=rf"^`\S*{named}` must not raise .* raised {type(error).__name__}: ") as raised:
        fit(where, error)
    assert raised.value.__cause__ is error, "with its traceback"


@pytest.mark.parametrize("where", ["reward", "task", "control", "engine", "loader"])
def test_the_same_of_every_other_part_of_a_run(where):
    with pytest.raises(ValueError, match=r"raised SystemExit: 0"):
        fit(where, SystemExit(0))


def test_with_every_callback_of_the_command_line_the_error_of_a_step_is_the_one_that_is_seen(tmp_path):
    writing = {"default_root_dir": tmp_path, "logger": pl.loggers.CSVLogger(tmp_path)}
    for error in (StopIteration("drained"), RuntimeError("broken")):
        run = trainer(2, *default_callbacks(), enable_checkpointing=True, **writing)
        for method in (run.fit, run.validate):
            with pytest.raises((ValueError, RuntimeError), match=r"StopIteration: drained|^broken$"):
                method(module(engine=Engine(error)), batches(2, size=2))


def test_a_callback_that_fails_after_an_error_does_not_hide_it():
    clumsy = Callback(KeyError("file"), hook="on_exception")
    with (
        pytest.warns(UserWarning, match=r"`Callback.on_exception` failed \(KeyError: 'file'\), after the error that"),
        pytest.raises(RuntimeError, match=r"^first$"),
    ):
        trainer(2, clumsy).fit(module(engine=Engine(RuntimeError("first"))), batches(2, size=2))


def test_errors_of_other_kinds_keep_their_type_and_an_interrupt_is_none_of_the_codes():
    with pytest.raises(KeyError, match="mine"):
        fit("credit", KeyError("mine"))
    with pytest.raises(SystemExit) as stop:  # Lightning's, after Ctrl-C.
        fit("credit", KeyboardInterrupt())
    assert isinstance(stop.value.__context__, KeyboardInterrupt)
    seen = []

    def elsewhere():
        try:
            with explained(lambda error: "no Ctrl-C"):
                raise KeyboardInterrupt
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert isinstance(seen[0], ValueError), "Ctrl-C interrupts the main thread alone"


def test_the_profiler_of_a_run_is_still_the_users():
    given = pl.profilers.SimpleProfiler()
    run = trainer(1, profiler=given)
    for _ in range(2):
        run.fit(module(), batches(1, size=2))
    assert isinstance(run.profiler, GuardedHooks)
    assert run.profiler.given is given
    assert any("GrailModule.configure_optimizers" in action for action in given.recorded_durations)
    assert "GrailModule" in run.profiler.summary()


# --- on the command line --------------------------------------------------------------------------------------------

MINE = """
import sys
from lightning.pytorch import Callback
from grail_lightning.credit import Uniform

def ends(responses, references):
    sys.exit(0)

class Ends(Callback):
    def __init__(self, hook="on_fit_start"):
        setattr(self, hook, lambda *_, **__: sys.exit(0))

class Credit(Uniform):
    def __init__(self):
        sys.exit(0)
"""


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.task.rewards=[{function: mine_ends.ends}]"], "The reward `mine_ends.ends` raised SystemExit: 0"),
        (["--trainer.callbacks+=mine_ends.Ends"], r"raised SystemExit: 0 in .*<lambda>` \(mine_ends.py, line "),
        (["--trainer.callbacks+=mine_ends.Ends", "--trainer.callbacks.hook=setup"], r"SystemExit: 0 in .*mine_ends.py"),
        (["--model.credit=mine_ends.Credit"], r"Code that options name must not .* `Credit.__init__` \(mine_ends.py"),
        (
            ["--model.credit=mine_leaves.Credit"],
            r"Code that options name .*SystemExit: 0 in `<module>` \(mine_leaves.py",
        ),
    ],
)
def test_on_the_command_line_the_exit_code_is_2_whatever_the_codes_own_is(
    arguments, said, capsys, tmp_path, monkeypatch
):
    (tmp_path / "mine_ends.py").write_text(MINE)
    (tmp_path / "mine_leaves.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine_ends", "mine_leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert re.search(said, fails(capsys, "fit", *SHORT, "--evaluation.at_start=false", *arguments))


# --- environments ---------------------------------------------------------------------------------------------------


class Counted:
    """An environment with a limited number of instances, as one with a port or a licence for each is."""

    left = iter(())

    def __init__(self):
        self.number = next(Counted.left)

    def reset(self, **columns):
        pass

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize("validates", [False, True])
def test_an_environment_whose_constructor_raises_is_named_as_one_whose_reset_does(validates, tmp_path):
    """`next` raises a StopIteration, which Lightning drops inside of a training step."""
    Counted.left = iter([1])  # Of the task, which looks at its class.
    task = EnvironmentTask(Counted)
    data = torch.utils.data.DataLoader([[task.prompt({"problem": "Go.", "answer": None})]], batch_size=None)
    run = trainer(1, *default_callbacks(), default_root_dir=tmp_path)
    said = r"^`Counted\(\)` must not fail, but raised StopIteration$"
    with pytest.raises(ValueError, match=said):
        (run.validate if validates else run.fit)(module(), data)
    with pytest.raises(ValueError, match=said):
        EnvironmentTask(Counted)
