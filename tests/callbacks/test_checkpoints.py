import os
import signal
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from grail_lightning.callbacks import Evaluation, LastCheckpoint, default_callbacks
from grail_lightning.data import ArithmeticData
from tests import runs
from tests.callbacks.scripted import Scripted, box, run

# The scripted module says that prompts need no transfer, and Lightning would rather hear it from the data.
pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")


def _never_better(prompt, k, step):
    """Right before step 3, wrong afterwards."""
    return box(prompt.reference if step < 3 else "none")


def _data():
    return ArithmeticData(num_train=40, num_val=4, prompts_per_batch=2, eval_prompts_per_batch=4)


def _every_two_batches(max_steps, *callbacks):
    """Validates after every second batch, which is four optimiser steps."""
    options = {"enable_checkpointing": True, "val_check_interval": 2, "check_val_every_n_epoch": None}
    return run(max_steps, *callbacks, **options)


def _fit(folder, max_steps, *callbacks, path=None, ends=None, **options):
    """A run with `last.ckpt` in a folder, which `ends` with an exception or not, and what it was trained on."""
    module = Scripted(_never_better)
    trainer = _every_two_batches(max_steps, *callbacks, LastCheckpoint(folder=str(folder), **options))
    with pytest.raises(ends) if ends else nullcontext() as end:
        trainer.fit(module, datamodule=_data(), ckpt_path=path, weights_only=path and True)
    module.end = end
    return module


def _seen(*modules):
    """The prompts of each batch, one run after the other."""
    return [[prompt.messages for prompt in batch] for module in modules for batch in module.seen]


def _saved_at(file):
    return torch.load(file, weights_only=True)["global_step"]


def test_the_last_checkpoint_is_the_last_state_though_it_is_not_the_best(tmp_path):
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val/accuracy", mode="max", filename="best", save_last=False)
    _every_two_batches(8, Evaluation(at_start=False), best, LastCheckpoint(folder=str(tmp_path))).fit(
        Scripted(lambda prompt, k, step: box(prompt.reference if step < 6 else "none")), datamodule=_data()
    )
    # All right at step 4, all wrong at step 8.
    assert {file.stem: _saved_at(file) for file in tmp_path.glob("*.ckpt")} == {"best": 4, "last": 8}


@pytest.mark.parametrize("stop", [5, 8], ids=lambda stop: f"stopped_at_{stop}")
def test_a_run_that_stopped_goes_on_with_the_next_prompts(tmp_path, stop):
    whole, before = _fit(tmp_path / "whole", 16, Evaluation()), _fit(tmp_path, stop, Evaluation())
    after = _fit(tmp_path, 16, Evaluation(), path=tmp_path / "last.ckpt")
    # The batch in which `max_steps` fell is taken again from its beginning.
    before.seen = before.seen[: stop // 2]
    assert _seen(before, after) == _seen(whole)
    assert _saved_at(tmp_path / "last.ckpt") == 16


def test_a_new_run_leaves_the_checkpoint_of_an_earlier_one_in_the_same_folder(tmp_path):
    """A folder of the user's, which does not move aside with the run's own."""
    _fit(tmp_path, 4)
    _fit(tmp_path, 2)
    assert (_saved_at(tmp_path / "last.ckpt"), _saved_at(tmp_path / "last.1.ckpt")) == (2, 4)


class Stop(Callback):
    """Asks for the end in a batch, as early stopping does."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.global_step == self.step


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("stop", ["max_steps", "should_stop"])
def test_a_run_that_stopped_inside_an_epoch_trains_on_the_rest_of_it(stop, validation, tmp_path):
    """Two epochs of three batches, and two steps a batch; Lightning closes the epoch before the last save."""

    def fit(part, max_steps=-1, *callbacks, path=None):
        last = LastCheckpoint(folder=str(tmp_path / part), every_n_batches=1)
        module, data = Scripted(_never_better), ArithmeticData(num_train=6, num_val=4, prompts_per_batch=2)
        how = {} if validation else {"limit_val_batches": 0}
        trainer = run(
            max_steps, Evaluation(at_start=False), *callbacks, last, enable_checkpointing=True, max_epochs=2, **how
        )
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=path and True)
        return _seen(module)

    whole = fit("whole")
    assert len(whole) == 6
    for step in (2, 8):
        before = fit("cut", step) if stop == "max_steps" else fit("cut", -1, Stop(step))
        assert len(before) == step // 2
        assert before + fit("cut", path=tmp_path / "cut" / "last.ckpt") == whole
    # An epoch that is over stays over, also in a checkpoint that is saved before the next one begins.
    first = fit("first", -1, Stop(6))
    fit("second", 7, path=tmp_path / "first" / "last.ckpt")  # It saves at once, for 7 is inside a batch.
    assert first + fit("second", path=tmp_path / "second" / "last.ckpt") == whole
    with pytest.raises(
        ValueError, match=r"`trainer.max_epochs` must be above the epoch .*, but got 2, .* is of epoch 2"
    ):
        fit("cut", path=tmp_path / "cut" / "last.ckpt")


class WithoutValidation(ArithmeticData):
    def load(self, split):
        return [] if split == "val" else super().load(split)


class EmptyLoaders(ArithmeticData):
    """A data module of the user's, with which Lightning finds out late that there is nothing to validate."""

    def val_dataloader(self):
        return []


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize("kind", [WithoutValidation, EmptyLoaders])
def test_what_waits_for_a_validation_does_not_wait_where_there_is_none(kind, tmp_path):
    data = kind(num_train=40, num_val=4, prompts_per_batch=2)
    last = LastCheckpoint(folder=str(tmp_path), every_n_batches=2)
    with pytest.raises(SystemExit):
        _every_two_batches(16, last, Terminate("on_train_batch_start", 6)).fit(Scripted(_never_better), datamodule=data)
    assert _saved_at(tmp_path / "last.ckpt") == last._saved_at == 8


@pytest.mark.parametrize(
    ("step", "said"), [(2, "at step 2, before its first checkpoint"), (6, "last.ckpt is of step 4")]
)
def test_an_interrupted_run_says_what_to_go_on_from(step, said, tmp_path, caplog):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == step:
                raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        _fit(tmp_path, 8, Evaluation(), Interrupt(), ends=SystemExit)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert said in caplog.text
    assert (f"`--ckpt_path={tmp_path / 'last.ckpt'}`" in caplog.text) == (step == 6)


class Terminate(Callback):
    """Has the process be sent a SIGTERM when its hook is called at a step."""

    def __init__(self, hook, step):
        setattr(self, hook, lambda trainer, *_: trainer.global_step == step and os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize(
    ("hook", "step", "border"),
    [("on_train_batch_start", 2, 4), ("on_train_batch_end", 2, 2), ("on_validation_start", 4, 4)],
    ids=["in_a_batch", "behind_a_batch", "in_a_validation"],
)
def test_a_sigterm_saves_at_the_next_border_and_says_how_to_go_on(hook, step, border, tmp_path, caplog):
    whole, file = _fit(tmp_path / "whole", 8, Evaluation()), tmp_path / "last.ckpt"
    before = _fit(tmp_path, 8, Terminate(hook, step), Evaluation(), ends=SystemExit, on_validation=False)
    assert before.end.value.code == 143
    assert f"Ended by SIGTERM at step {border}; {file} is of step {border}. Resume with the same command" in caplog.text
    after = _fit(tmp_path, 8, Evaluation(), path=file)
    assert _seen(before, after) == _seen(whole)
    for ours, theirs in zip(after.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_sigterm_with_nothing_to_save_ends_at_once(method, tmp_path, caplog):
    ours, terminate = Scripted(_never_better), Terminate("on_validation_batch_start", 0)
    trainer = _every_two_batches(8, terminate, Evaluation(), LastCheckpoint(folder=str(tmp_path)))
    with pytest.raises(SystemExit) as stop:
        getattr(trainer, method)(ours, datamodule=_data())
    assert stop.value.code == 143
    where = " at step 0, before its first checkpoint." if method == "fit" else "."
    assert f"Ended by SIGTERM{where}" in caplog.text
    assert not ours.seen
    assert not list(tmp_path.iterdir())


class Validated(Callback):
    """The steps at which validations came to their end, and a validation that is cut off."""

    def __init__(self, cut_off=None):
        self.steps, self.cut_off = [], cut_off

    def on_validation_start(self, trainer, pl_module):
        if trainer.global_step == self.cut_off:
            raise ConnectionError("the machine is gone")

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def test_a_validation_that_was_cut_off_is_made_up_for(tmp_path):
    how, before, after = {"every_n_batches": 1, "on_validation": False}, Validated(cut_off=8), Validated()
    _fit(tmp_path, 12, Evaluation(), before, ends=ConnectionError, **how)
    assert before.steps == [0, 4]
    assert _saved_at(tmp_path / "last.ckpt") == 6, "that of the batch before"
    _fit(tmp_path, 12, Evaluation(), after, path=tmp_path / "last.ckpt", **how)
    assert after.steps == [8, 12]


@pytest.mark.parametrize("step", [2, 6])
def test_a_sigterm_in_the_batch_before_a_validation_ends_the_run_after_it(step, tmp_path):
    before, after, evaluation = Validated(), Validated(), Evaluation()
    ends = SystemExit if step == 2 else None  # In its last batch a run comes to its end.
    _fit(tmp_path, 8, Terminate("on_train_batch_start", step), evaluation, before, ends=ends)
    assert evaluation.last["step"] == step + 2
    if step == 2:
        _fit(tmp_path, 8, Evaluation(), after, path=tmp_path / "last.ckpt")
    assert before.steps + after.steps == [0, 4, 8], "each validation once"
    assert _saved_at(tmp_path / "last.ckpt") == 8


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")  # Lightning's own warning
@pytest.mark.parametrize(("method", "callbacks"), [("fit", default_callbacks), ("fit", list), ("validate", list)])
def test_the_last_checkpoint_of_a_trainer_that_has_none_is_an_error(method, callbacks, tmp_path):
    ours = runs.module()
    trainer = run(1, *callbacks(), default_root_dir=tmp_path, enable_checkpointing=True, enable_progress_bar=True)
    with pytest.raises(ValueError, match=r'`ckpt_path="last"` must find a checkpoint, but .* Give the file'):
        getattr(trainer, method)(ours, datamodule=_data(), ckpt_path="last")
    assert ours.policy is None, "nothing was loaded"


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_last_checkpoint_of_a_trainer_is_found_and_a_run_without_a_step_left_is_an_error(tmp_path):
    def fit(max_steps, ckpt_path=None):
        callbacks = ModelCheckpoint(dirpath=tmp_path), LastCheckpoint(folder=str(tmp_path))
        trainer = run(max_steps, *callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
        trainer.fit(Scripted(_never_better), datamodule=_data(), ckpt_path=ckpt_path, weights_only=False)
        return trainer.global_step

    assert fit(2) == 2
    assert fit(4, "last") == 4
    with pytest.raises(ValueError, match=r"`trainer.max_steps` must be above .* but got 4, .*last.ckpt is of step 4"):
        fit(4, "last")


def test_a_run_goes_on_from_inside_a_batch_with_the_next_prompts(tmp_path):
    whole, before = _fit(tmp_path / "whole", 8), _fit(tmp_path / "cut", 5)
    before.trainer.save_checkpoint(tmp_path / "inside.ckpt")
    with pytest.warns(UserWarning, match="saved inside a batch"):
        after = _fit(tmp_path / "resumed", 7, path=tmp_path / "inside.ckpt")
    assert _seen(before, after) == _seen(whole)
