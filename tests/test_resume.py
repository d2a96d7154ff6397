"""A resumed run goes on as if it had never stopped; what the user changed at the resume, and only that, is another."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, AdamW, lr_scheduler

from grail_lightning import ArithmeticData, KeepRollouts, LastCheckpoint, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.optimizer import ConfiguredOptions
from grail_lightning.credit import PRIME, RLSD
from tests.runs import Drawing, Watch, module, trained_model, trainer, weights

HALF = 2
SCHEDULES = {
    "none": None,
    "anew": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2e-4, total_steps=20),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-5, max_lr=3e-4, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-4, total_steps=9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, T_max=5)], milestones=[2]
    ),
}
CYCLES = ("CyclicLR", "OneCycleLR")  # They have a rate of their own: the optimiser's has no effect on them.


class Schedule:
    """An optimiser and its schedule as the module makes them, or resumes them after another's `HALF` steps."""

    def __init__(self, make, schedule, after=None):
        self.optimizer, self.scheduler = make([torch.nn.Parameter(torch.ones(2))]), None
        configured = ConfiguredOptions(self.optimizer, schedule)
        if schedule is not None:
            self.scheduler = schedule(self.optimizer)
        if after is not None:
            self.optimizer.load_state_dict(after.optimizer.state_dict())
            configured.apply(self.optimizer, self.scheduler, HALF)

    def rates(self, steps=HALF):
        """The learning rate of each of the next steps."""
        found = []
        for _ in range(steps):
            found.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return found

    @property
    def options(self):
        return {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize(
    ("begun", "name", "rate"),
    [
        *((name, name, 1e-4) for name in ("none", "LinearLR", *CYCLES, "SequentialLR")),
        *((name, name, 3e-4) for name in ("none", "LinearLR", *CYCLES)),
        *(("OneCycleLR", name, 1e-4) for name in ("anew", "StepLR", "none")),
    ],
)
def test_a_rate_and_a_schedule_go_on_as_those_of_a_run_that_always_had_them(begun, name, rate):
    make = partial(AdamW, lr=rate, weight_decay=0.0)
    before, always = Schedule(partial(make, lr=1e-4), SCHEDULES[begun]), Schedule(make, SCHEDULES[name])
    before.rates()
    always.rates()
    resumed = Schedule(make, SCHEDULES[name], after=before)
    rates = resumed.rates()
    assert rates == always.rates()
    assert {option: resumed.options[option] for option in always.options} == always.options
    assert (rates == before.rates()) == (name == begun and (rate == 1e-4 or name in CYCLES))


class Counting(SGD):
    """Counts its steps among its options, as optimisers without a schedule do (Prodigy, schedule-free ones)."""

    def __init__(self, params, lr, momentum=0.0):
        super().__init__(params, lr=lr, momentum=momentum)
        self.param_groups[0]["taken"] = 0

    def step(self, closure=None):
        self.param_groups[0]["taken"] += 1
        return super().step(closure)


def test_what_an_optimizer_writes_into_its_options_is_kept_and_what_the_user_changes_is_not():
    before = Schedule(partial(Counting, lr=1e-3), SCHEDULES["OneCycleLR"])
    before.rates()
    resumed = Schedule(partial(Counting, lr=2e-3, momentum=0.5), SCHEDULES["LinearLR"], after=before)
    assert resumed.rates()[-1] == pytest.approx(2e-3)
    assert (resumed.options["taken"], resumed.options["momentum"]) == (2 * HALF, 0.5)


def data():
    """Six batches an epoch."""
    return ArithmeticData(num_train=12, num_val=2, prompts_per_batch=2, eval_prompts_per_batch=2)


CUT = {"group_size": 2, "mini_batches": 2, "entropy_coefficient": 0.1, "mask_truncated": False}


def fit(folder, max_steps, path=None, *callbacks, objective=CUT, **changes):
    """A run of two optimiser steps a batch, or as an objective has it, with `last.ckpt` in a folder."""
    ours = module(objective, sampling=Sampling(max_response_length=3), **changes)
    fitted = trainer(max_steps, *callbacks, LastCheckpoint(folder=str(folder)), enable_checkpointing=True)
    torch.manual_seed(len(callbacks))  # Whatever else has drawn in between.
    fitted.fit(ours, data(), ckpt_path=path, weights_only=False)
    return fitted, weights(ours)


def test_a_run_with_a_schedule_and_an_optimizer_that_draws_random_numbers_goes_on_and_takes_changes(tmp_path):
    last, watch = tmp_path / "last.ckpt", Watch()
    how = {"objective": CUT | {"mini_batches": 1}, "optimizer": partial(Drawing, lr=1e-3)}
    one = how | {"scheduler": SCHEDULES["OneCycleLR"]}
    _, expected = fit(tmp_path / "whole", 2 * HALF, **one)
    fit(tmp_path, HALF, **one)
    other = how | {"optimizer": partial(Drawing, lr=2e-3), "scheduler": SCHEDULES["LinearLR"]}
    fit(tmp_path / "other", 2 * HALF, last, watch, **other)
    rates = [output.metrics["learning_rate"] for output in watch.outputs]
    assert rates == Schedule(other["optimizer"], other["scheduler"]).rates(2 * HALF)[HALF:]
    _, found = fit(tmp_path, 2 * HALF, last, Watch(), **one)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    assert any(not torch.equal(p, found[name]) for name, p in load_policy("arithmetic").named_parameters())


def test_a_run_that_stopped_inside_batches_ends_with_the_weights_of_one_that_did_not(tmp_path, caplog):
    """Single rows are dealt over the steps, and a batch that was cut is kept once."""
    split = CUT | {"split_groups": True}
    (_, whole), path = fit(tmp_path / "whole", 6, objective=split), None
    for stop, steps in ((1, [1]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (6, [2, 4, 6])):
        run, found = fit(tmp_path, stop, path, KeepRollouts(folder=str(tmp_path / "kept")), objective=split)
        path, border = tmp_path / "last.ckpt", stop - stop % 2
        assert run.global_step == stop
        assert torch.load(path, weights_only=False)["global_step"] == border
        said = f"`max_steps` {stop} fell inside a batch of rollouts: {path} is of step {border}, where that batch began"
        assert (said in caplog.text) == (border != stop)
        assert sorted(int(file.name.split("_")[1]) for file in (tmp_path / "kept").iterdir()) == steps
    assert all(torch.equal(weight, found[name]) for name, weight in whole.items())


class Teacher(Callback):
    """When the teacher of RLSD was copied, and how many steps the reward model of PRIME has taken."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.copied_at = getattr(pl_module.credit, "_copied_at", None)
        second = trained_model(pl_module)
        self.taken = second and second.steps


@pytest.mark.parametrize(
    "credit",
    [RLSD(refresh_steps=100, decay_steps=1000), PRIME(optimizer=lambda p: SGD(p, lr=1e-3), accuracy=(0, 1))],
    ids=["RLSD", "PRIME"],
)
def test_a_second_fit_of_a_module_begins_anew(credit, tmp_path):
    """Its weights stay. A batch that the first fit has cut must not keep the second one from saving."""
    ours = module(CUT, sampling=Sampling(max_response_length=3), credit=credit)
    for number, most in enumerate((3, 1)):
        seen, last = Teacher(), LastCheckpoint(folder=str(tmp_path / str(number)))
        trainer(most, seen, last, enable_checkpointing=True).fit(ours, data())
        assert seen.copied_at in (None, 0)
        assert seen.taken in (None, 2 - number), "one step a batch"
        assert (tmp_path / str(number) / "last.ckpt").exists()
        if number == 0:
            assert ours.steps_cut == 1
