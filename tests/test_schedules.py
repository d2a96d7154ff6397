"""Learning-rate schedules that end before the run, or fail in the middle of it."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from grail_lightning import LastCheckpoint
from grail_lightning.core.step.schedule import check_schedule
from tests.runs import Watch, batches, module, trainer
from tests.shell import SHORT, fails_early

STEPS = 6


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def one_cycle(optimizer, steps=STEPS):
    return torchs.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)


def by_epochs(optimizer, steps):
    return torchs.OneCycleLR(optimizer, max_lr=1e-3, epochs=2, steps_per_epoch=steps // 2)


def after_a_warm_up(optimizer, steps):
    warm_up = torchs.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    return torchs.SequentialLR(optimizer, [warm_up, one_cycle(optimizer, steps - 2)], milestones=[2])


def chained(optimizer, steps):
    return torchs.ChainedScheduler([torchs.ConstantLR(optimizer, 0.5), one_cycle(optimizer, steps)])


class Listed(torchs.LRScheduler):
    """The rates of a list, as users write it."""

    def __init__(self, optimizer, rates=(1e-4, 1e-4)):
        self.rates = list(rates)
        super().__init__(optimizer)

    def get_lr(self):
        return [self.rates[self.last_epoch]] * len(self.base_lrs)


def listed(optimizer, steps):
    return Listed(optimizer, [1e-4] * (steps + 1))


TOO_SHORT = rf"`scheduler` must last for the {STEPS} .*`trainer.max_steps` 6.*, after optimiser step "
OWN = r"`scheduler` must not fail, but Listed raised IndexError.*`Listed.get_lr` .* optimiser step 5 of a rehearsal"


@pytest.mark.parametrize(
    ("make", "message"),
    [*((make, TOO_SHORT) for make in (one_cycle, by_epochs, after_a_warm_up, chained)), (listed, OWN)],
)
def test_a_schedule_lasts_for_the_run_or_is_refused_with_the_step_at_which_it_ends(make, message):
    """OneCycleLR allows as many steps as it has; a list needs one more rate, which nobody uses."""
    check_schedule(adam, lambda optimizer: make(optimizer, STEPS), trainer(STEPS), 1)
    with pytest.raises(ValueError, match=message):
        check_schedule(adam, lambda optimizer: make(optimizer, STEPS - 2), trainer(STEPS), 1)


def test_on_the_command_line_it_is_one_line_before_a_model_is_loaded(capsys, tmp_path):
    cycle = ["--model.scheduler=OneCycleLR", "--model.scheduler.max_lr=1e-4", "--model.scheduler.total_steps=3"]
    folder = f"--trainer.default_root_dir={tmp_path}"
    said = fails_early(capsys, "fit", *SHORT, folder, *cycle, "--trainer.max_steps=4")
    assert "must last for the 4 optimiser steps of the run (`trainer.max_steps` 4), but OneCycleLR raised" in said
    assert "after optimiser step 4" in said
    # 32 problems in batches of 4 are 8 batches an epoch, of 2 steps each.
    epochs = ["--trainer.max_steps=-1", "--trainer.max_epochs=2", "--model.execution.mini_batches=2"]
    said = fails_early(capsys, "fit", *SHORT, folder, *cycle, *epochs)
    assert "must last for the 32 optimiser steps of the run (`trainer.max_epochs` 2, of 8 batches each)" in said


def test_from_python_a_longer_run_with_a_schedule_of_a_shorter_one_loads_no_model(tmp_path):
    """As somebody does who resumes with more `max_steps`, and leaves the schedule as it was."""
    trainer(2).fit(ours := module(scheduler=lambda optimizer: one_cycle(optimizer, 2)), batches(2, size=2))
    assert ours.global_step == 2
    longer = module(scheduler=lambda optimizer: one_cycle(optimizer, 2))
    with pytest.raises(ValueError, match=r"must last for the 4 optimiser steps .* raised ValueError: Tried to step"):
        trainer(4).fit(longer, batches(4, size=2))
    assert longer.policy is None


@pytest.mark.parametrize(
    ("make", "steps", "said"),
    [
        (lambda o: torchs.CosineAnnealingLR(o, T_max=4), 6, "`T_max` 4 steps, but the schedule is used for 6"),
        (lambda o: torchs.CosineAnnealingLR(o, T_max=5), 6, ""),
        (lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=2), 6, ""),
        (lambda o: torchs.CyclicLR(o, 1e-5, 1e-4, 2, cycle_momentum=False), 6, ""),
        (lambda o: torchs.PolynomialLR(o, total_iters=3), 6, "is 0 after optimiser step 3 of 6"),
        (lambda o: torchs.LinearLR(o, 1.0, 0.0, total_iters=6), 6, ""),
        (lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=2), 6, ""),
        (
            lambda o: torchs.SequentialLR(
                o, [torchs.ConstantLR(o, 1.0), torchs.CosineAnnealingLR(o, T_max=2)], milestones=[2]
            ),
            6,
            "`T_max` 2 steps, but the schedule is used for 4",
        ),
    ],
)
def test_a_rate_that_rises_again_or_stays_at_zero_is_told(make, steps, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_schedule(adam, make, trainer(steps), 1)
    told = " ".join(
        str(one.message) for one in caught if "optimiser step" in str(one.message) or "T_max" in str(one.message)
    )
    assert said in told
    assert bool(said) == bool(told)


def test_what_code_of_the_users_raises_in_the_rehearsal_is_no_schedule_that_is_too_short():
    def rate(step):
        return {0: 1.0, 1: 0.5}[step]

    ours = module(scheduler=lambda optimizer: torchs.LambdaLR(optimizer, rate))
    with pytest.raises(ValueError, match=r"LambdaLR raised KeyError: 2 in .*rate` \(test_schedules.py, line") as raised:
        trainer(4).fit(ours, batches(4, size=2))
    assert "must last" not in str(raised.value)


class Unreliable(torchs.LRScheduler):
    """One that fails in the run alone, as one does that reads a figure of the run."""

    ready = True

    def get_lr(self):
        if self.last_epoch == 3 and not self.ready:
            raise KeyError("plateau")
        return [1e-4]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_what_a_schedule_raises_in_the_run_names_its_place_and_the_state_of_that_batch_is_kept(
    mini_batches, tmp_path, monkeypatch, caplog
):
    class Begins(LastCheckpoint):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            monkeypatch.setattr(Unreliable, "ready", False)

    ours = module({"mini_batches": mini_batches}, scheduler=Unreliable)
    watch = Watch()
    run = trainer(8, watch, Begins(folder=str(tmp_path)), enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(
        ValueError,
        match=r"`scheduler` failed after .* step 3: Unreliable raised KeyError: 'plateau' in .*get_lr` \(test_s",
    ):
        run.fit(ours, batches(8, size=2))
    kept = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert kept["global_step"] == watch.steps[-1] >= 3, "the batch is trained to its end"
    assert not kept["steps_left"]
    assert f"last.ckpt is of step {watch.steps[-1]}. Resume with" in caplog.text
    monkeypatch.setattr(Unreliable, "ready", True)
    resumed = module({"mini_batches": mini_batches}, scheduler=Unreliable)
    trainer(6).fit(resumed, batches(8, size=2), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.global_step == 6
