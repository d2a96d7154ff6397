import os
import signal
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from grail_lightning import ArithmeticData, Evaluation, LastCheckpoint, default_callbacks
from grail_lightning.app.callbacks.checkpoints import DefaultCheckpoints
from tests import runs
from tests.app.callbacks.scripted import Scripted, box, run

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four batches that nothing stopped."""
    return _fit(tmp_path_factory.mktemp("whole"), 8, Evaluation())


def _seen(*modules):
    """The prompts of each batch, one run after the other."""
    return [[prompt.messages for prompt in batch] for module in modules for batch in module.seen]


def _saved_at(file):
    return torch.load(file, weights_only=True)["global_step"]


class At(Callback):
    """Does something when its hook is called at a step."""

    def __init__(self, hook, step, act):
        setattr(self, hook, lambda trainer, *_: act(trainer) if trainer.global_step == step else None)


def _terminate(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(trainer):
    """As early stopping does."""
    trainer.should_stop = True


def _interrupt(trainer):
    raise KeyboardInterrupt


def _fail(trainer):
    raise ConnectionError("the machine is gone")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_last_checkpoint_is_the_last_state_and_a_new_run_leaves_that_of_an_earlier_one(tmp_path):
    """In a folder of the user's, which does not move aside with the run's own."""
    best = DefaultCheckpoints().best
    best.dirpath = str(tmp_path)
    _fit(tmp_path, 8, Evaluation(), best)
    assert {file.stem: _saved_at(file) for file in tmp_path.glob("*.ckpt")} == {"best": 4, "last": 8}
    _fit(tmp_path, 2)
    assert (_saved_at(tmp_path / "last.ckpt"), _saved_at(tmp_path / "last.1.ckpt")) == (2, 8)
    earlier = (tmp_path / "best.ckpt").stat().st_ino
    _fit(tmp_path, 4, Evaluation(), best)
    assert (tmp_path / "best.1.ckpt").stat().st_ino == earlier
    assert {file.name for file in tmp_path.glob("best*")} == {"best.ckpt", "best.1.ckpt"}


def test_a_run_that_stopped_inside_an_epoch_trains_on_the_rest_of_it(tmp_path):
    """Two epochs of three batches, and two steps a batch; Lightning closes the epoch before the last save."""

    def fit(part, max_steps=-1, *callbacks, path=None, **how):
        last = LastCheckpoint(folder=str(tmp_path / part), every_n_batches=1)
        module, data = Scripted(_never_better), ArithmeticData(num_train=6, num_val=4, prompts_per_batch=2)
        options = {"enable_checkpointing": True, "max_epochs": 2} | how
        trainer = run(max_steps, Evaluation(at_start=False), *callbacks, last, **options)
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=path and True)
        return _seen(module)

    whole, none = fit("whole"), {"limit_val_batches": 0}
    assert len(whole) == 6
    for part, step, max_steps, how in (("a", 2, 2, {}), ("b", 2, -1, none), ("c", 8, 8, none), ("d", 8, -1, {})):
        stop = [] if max_steps > 0 else [At("on_train_batch_end", step, _stop)]
        before = fit(part, max_steps, *stop, **how)
        assert len(before) == step // 2
        assert before + fit(part, path=tmp_path / part / "last.ckpt", **how) == whole
    # An epoch that is over stays over, also in a checkpoint that is saved before the next one begins.
    first = fit("first", -1, At("on_train_batch_end", 6, _stop))
    fit("second", 7, path=tmp_path / "first" / "last.ckpt")  # It saves at once, for 7 is inside a batch.
    assert first + fit("second", path=tmp_path / "second" / "last.ckpt") == whole
    with pytest.raises(ValueError, match=r"`trainer.max_epochs` must be above .*, but got 2, .* is of epoch 2"):
        fit("whole", path=tmp_path / "whole" / "last.ckpt")


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
    trainer = _every_two_batches(8, last, At("on_train_batch_start", 2, _terminate))
    with pytest.raises(SystemExit):
        trainer.fit(Scripted(_never_better), datamodule=data)
    assert _saved_at(tmp_path / "last.ckpt") == last._saved_at == 4


def test_an_interrupted_run_says_what_to_go_on_from(tmp_path, caplog):
    handler, file = signal.getsignal(signal.SIGINT), tmp_path / "last.ckpt"
    try:
        _fit(tmp_path, 8, Evaluation(), At("on_train_batch_end", 6, _interrupt), ends=SystemExit)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert f"Interrupted at step 6; {file} is of step 4. Resume" in caplog.text
    assert f"`--ckpt_path={file}`" in caplog.text


class Validated(Callback):
    """The steps at which validations came to their end."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("hook", "step", "border", "on_validation"),
    [
        ("on_train_start", 0, 2, True),  # Lightning's handler receives it.
        ("on_train_batch_start", 2, 4, True),
        ("on_train_batch_end", 2, 2, False),
        ("on_validation_start", 4, 4, False),
    ],
)
def test_a_sigterm_saves_at_the_next_border_and_says_how_to_go_on(
    hook, step, border, on_validation, whole, tmp_path, caplog
):
    file, validated, evaluation = tmp_path / "last.ckpt", Validated(), Evaluation()
    callbacks, how = [At(hook, step, _terminate), evaluation, validated], {"on_validation": on_validation}
    before = _fit(tmp_path, 8, *callbacks, ends=SystemExit, **how)
    assert before.end.value.code == 143
    assert evaluation.last["step"] == border // 4 * 4
    assert f"Ended by SIGTERM at step {border}; {file} is of step {border}. Resume with the same command" in caplog.text
    after = _fit(tmp_path, 8, Evaluation(), validated, path=file)
    assert _seen(before, after) == _seen(whole)
    assert validated.steps == [0, 4, 8], "each validation once"
    for ours, theirs in zip(after.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_gets_a_sigterm_in_its_last_batch_comes_to_its_end(tmp_path):
    evaluation = Evaluation()
    _fit(tmp_path, 4, At("on_train_batch_start", 2, _terminate), evaluation)
    assert evaluation.last["step"] == _saved_at(tmp_path / "last.ckpt") == 4


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_sigterm_with_nothing_to_save_ends_at_once(method, tmp_path, caplog):
    ours, terminate = Scripted(_never_better), At("on_validation_batch_start", 0, _terminate)
    trainer = _every_two_batches(8, terminate, Evaluation(), LastCheckpoint(folder=str(tmp_path)))
    with pytest.raises(SystemExit) as stop:
        getattr(trainer, method)(ours, datamodule=_data())
    assert stop.value.code == 143
    where = " at step 0, before its first checkpoint." if method == "fit" else "."
    assert f"Ended by SIGTERM{where}" in caplog.text
    assert not ours.seen
    assert not list(tmp_path.iterdir())


def test_a_validation_that_was_cut_off_is_made_up_for(tmp_path):
    how, validated = {"every_n_batches": 1, "on_validation": False}, Validated()
    _fit(tmp_path, 8, Evaluation(), At("on_validation_start", 4, _fail), validated, ends=ConnectionError, **how)
    assert _saved_at(tmp_path / "last.ckpt") == 2, "that of the batch before"
    _fit(tmp_path, 8, Evaluation(), validated, path=tmp_path / "last.ckpt", **how)
    assert validated.steps == [0, 4, 8]


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")  # Lightning's own warning
@pytest.mark.parametrize(("method", "callbacks"), [("fit", default_callbacks), ("validate", list)])
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


def test_a_run_goes_on_from_inside_a_batch_with_the_next_prompts(whole, tmp_path):
    before = _fit(tmp_path / "cut", 5)
    before.trainer.save_checkpoint(tmp_path / "inside.ckpt")
    with pytest.warns(UserWarning, match="saved inside a batch"):
        after = _fit(tmp_path / "resumed", 7, path=tmp_path / "inside.ckpt")
    assert _seen(before, after) == _seen(whole)


def test_checkpoints_of_lightning_between_two_validations_are_named_after_their_own_step(tmp_path):
    each = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    with pytest.warns(UserWarning, match="AFTER optimization"):  # Lightning's, of manual optimisation
        _fit(tmp_path / "last", 8, Evaluation(), each)
    saved = {file.stem: _saved_at(file) for file in tmp_path.glob("*.ckpt")}
    assert saved == {"step=2": 2, "step=4": 4, "step=6": 6, "step=8": 8}


@pytest.mark.filterwarnings("ignore:.*ckpt_path=", "ignore:.*no last checkpoint")  # Lightning's, of such a callback
def test_a_checkpoint_of_an_exception_inside_a_batch_says_on_a_resume_that_the_batch_is_lost(whole, tmp_path):
    saved = OnExceptionCheckpoint(tmp_path)
    before = _fit(tmp_path, 8, At("on_train_batch_start", 4, _fail), saved, ends=ConnectionError)
    with pytest.warns(UserWarning, match="saved inside a batch of rollouts, at step 4: .* at most 2 steps"):
        after = _fit(tmp_path / "resumed", 6, path=tmp_path / "on_exception.ckpt")
    assert _seen(before, after) == [*_seen(whole)[:2], _seen(whole)[3]]


def test_the_last_checkpoint_knows_the_best_one_that_lightning_saves_at_the_end_of_an_epoch(tmp_path):
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val/accuracy", mode="max", filename="best")
    trainer = run(8, Evaluation(), best, LastCheckpoint(folder=str(tmp_path)), enable_checkpointing=True)
    data = ArithmeticData(num_train=4, num_val=4, prompts_per_batch=2, eval_prompts_per_batch=4)
    trainer.fit(Scripted(lambda prompt, k, step: box(prompt.reference if step > 5 else "none")), datamodule=data)
    assert _saved_at(best.best_model_path) == 8
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][best.state_key]
    assert (kept["best_model_path"], kept["best_model_score"]) == (best.best_model_path, best.best_model_score)
