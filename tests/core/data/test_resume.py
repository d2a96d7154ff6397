import pytest

from tests.core.data.recorder import Recorder, SaveEveryBatch, fit, ten

pytestmark = pytest.mark.usefixtures("_calm")


@pytest.fixture
def _calm(caplog):
    """Without the lines that a Trainer prints."""
    caplog.set_level("ERROR", logger="lightning.pytorch")


@pytest.mark.parametrize(
    ("manual", "options"),
    [(False, {}), (True, {"limit_train_batches": 2}), (True, {"val_check_interval": 2})],
)
def test_a_run_resumed_after_any_batch_sees_the_prompts_of_one_that_never_stopped(tmp_path, manual, options):
    steps = 2 if manual else 1
    options = {"max_epochs": -1, "check_val_every_n_epoch": None if "val_check_interval" in options else 1} | options
    whole = Recorder(manual)
    fit(whole, ten(), max_steps=8 * steps, callbacks=[SaveEveryBatch(tmp_path)], **options)
    assert len(whole.train_prompts) == 8
    for batches in (1, 2, 3, 6):  # the third and the sixth end an epoch
        resumed = Recorder(manual)
        fit(resumed, ten(), tmp_path / f"{batches}.ckpt", max_steps=8 * steps, **options)
        assert resumed.train_prompts == whole.train_prompts[batches:]


@pytest.mark.parametrize("stopped_by", ["max_steps", "max_epochs"])
def test_a_run_that_ended_at_an_epoch_border_goes_on_behind_it(tmp_path, stopped_by):
    whole, first, second = Recorder(), Recorder(), Recorder()
    at = {"max_steps": (9, 3), "max_epochs": (3, 1)}[stopped_by]
    free = {"max_epochs": -1} if stopped_by == "max_steps" else {}
    fit(whole, ten(), **{stopped_by: at[0]}, **free)
    fit(first, ten(), **{stopped_by: at[1]}, **free).save_checkpoint(tmp_path / "border.ckpt")
    fit(second, ten(), tmp_path / "border.ckpt", **{stopped_by: at[0]}, **free)
    assert len(first.train_prompts) == 3
    assert first.train_prompts + second.train_prompts == whole.train_prompts


def test_overfitting_repeats_the_same_prompts():
    module = Recorder()
    fit(module, ten(), max_epochs=3, overfit_batches=1)
    assert len({frozenset(batch) for batch in module.train_prompts}) == 1
    assert len(module.train_prompts) == 3
