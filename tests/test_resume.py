"""A resumed run goes on as if it had never stopped; what the user changed at the resume, and only that, is another."""

import warnings
from functools import cache, partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, AdamW, lr_scheduler

from grail_lightning.batch import Sampling
from grail_lightning.callbacks import KeepRollouts, LastCheckpoint
from grail_lightning.credit import PRIME, RLSD
from grail_lightning.data import ArithmeticData
from grail_lightning.policy import load_policy
from tests.runs import Drawing, Watch, batches, module, trainer, weights

STEPS = 4
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


class Rates(Watch):
    """Keeps the learning rate of each step and the optimiser's options at the end; saves a checkpoint on the way."""

    def __init__(self, save_at, file):
        super().__init__()
        self.save_at, self.file = save_at, file

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.file)

    def on_train_end(self, trainer, pl_module):
        (group,) = trainer.optimizers[0].param_groups
        self.options = {name: value for name, value in group.items() if name != "params"}
        self.rates = [output.metrics["learning_rate"] for output in self.outputs]


def adam(parameters, **changes):
    return AdamW(parameters, **({"lr": 1e-4, "weight_decay": 0.0} | changes))


def fit(file, optimizer=adam, scheduler=None, start=0):
    """A run of one optimiser step a batch, from `file` on if it starts late: its figures, and its weights."""
    # The bonus gives every row a gradient.
    objective = {"group_size": 2, "entropy_coefficient": 0.1, "mask_truncated": False}
    ours = module(objective, sampling=Sampling(max_response_length=3), optimizer=optimizer, scheduler=scheduler)
    rates = Rates(STEPS // 2 if start == 0 else None, file)
    # A list has no position of its own: the resumed run is given the batches that are left.
    left = torch.utils.data.DataLoader(batches(STEPS, size=1).dataset[start:], batch_size=None)
    trainer(STEPS, rates, max_epochs=2).fit(ours, left, ckpt_path=file if start else None, weights_only=True)
    return rates, weights(ours)


@pytest.fixture(autouse=True)
def _lists_of_batches(recwarn):
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that returns a run with a schedule and a rate, made once: checkpoint on its way, figures, weights."""
    folder = tmp_path_factory.mktemp("whole")

    @cache
    def run(name, rate=1e-4):
        file = folder / f"{name}{rate}.ckpt"
        torch.manual_seed(0)
        return file, *fit(file, partial(adam, lr=rate), SCHEDULES[name])

    return run


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("anew", "StepLR")])
def test_a_schedule_goes_on_after_a_resume_as_if_the_run_had_not_stopped(name, whole):
    file, uninterrupted, expected = whole(name)
    resumed, found = fit(file, scheduler=SCHEDULES[name], start=STEPS // 2)
    assert resumed.rates == uninterrupted.rates[STEPS // 2 :]
    assert resumed.options == uninterrupted.options
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    begun = load_policy("arithmetic").parameters()
    assert any(not torch.equal(weight, first) for weight, first in zip(expected.values(), begun, strict=True))


@pytest.mark.parametrize(
    ("begun", "name", "rate"),
    [
        *((name, name, 3e-4) for name in ("none", "LinearLR", "CyclicLR", "OneCycleLR")),
        *(("OneCycleLR", name, 1e-4) for name in ("anew", "StepLR", "none")),
    ],
)
def test_a_rate_or_a_schedule_that_is_set_anew_is_that_of_a_run_that_always_had_it(begun, name, rate, whole):
    """Cycles have a rate of their own: the optimiser's has no effect on them, whenever it is set."""
    file, before, _ = whole(begun)
    resumed, _ = fit(file, partial(adam, lr=rate), SCHEDULES[name], start=STEPS // 2)
    _, always, _ = whole(name, rate)
    assert resumed.rates == always.rates[STEPS // 2 :]
    assert {option: resumed.options[option] for option in always.options} == always.options
    assert (resumed.rates == before.rates[STEPS // 2 :]) == (name == begun in ("CyclicLR", "OneCycleLR"))


class Counting(SGD):
    """Counts its steps among its options, as optimisers without a schedule do (Prodigy, schedule-free ones)."""

    def __init__(self, params, lr, momentum=0.0):
        super().__init__(params, lr=lr, momentum=momentum)
        self.param_groups[0]["taken"] = 0

    def step(self, closure=None):
        self.param_groups[0]["taken"] += 1
        return super().step(closure)


def test_what_an_optimizer_writes_into_its_options_is_kept_and_what_the_user_changes_is_not(tmp_path):
    file = tmp_path / "half.ckpt"
    fit(file, partial(Counting, lr=1e-3), SCHEDULES["OneCycleLR"])
    resumed, _ = fit(file, partial(Counting, lr=2e-3, momentum=0.5), SCHEDULES["LinearLR"], start=STEPS // 2)
    assert resumed.options["taken"] == STEPS
    assert resumed.options["momentum"] == 0.5
    assert resumed.rates[-1] == pytest.approx(2e-3)


def test_an_optimizer_that_draws_random_numbers_draws_the_same_ones_after_a_resume(tmp_path):
    file, make = tmp_path / "half.ckpt", partial(Drawing, lr=1e-3)
    _, expected = fit(file, make)
    torch.rand(7)  # Whatever else has drawn in between.
    _, found = fit(file, make, start=STEPS // 2)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


CUT = {"group_size": 2, "mini_batches": 2, "entropy_coefficient": 0.1, "mask_truncated": False}


@pytest.fixture(scope="module")
def cut_fit(tmp_path_factory):
    """A function that runs two optimiser steps a batch on data that know where they are; `last.ckpt` is in a folder."""

    def run(folder, max_steps, path=None, *callbacks, **more):
        ours = module(CUT | more, sampling=Sampling(max_response_length=3))
        data = ArithmeticData(num_train=12, num_val=2, prompts_per_batch=2, eval_prompts_per_batch=2)
        fitted = trainer(max_steps, *callbacks, LastCheckpoint(folder=str(folder)), enable_checkpointing=True)
        torch.manual_seed(0)
        fitted.fit(ours, data, ckpt_path=path, weights_only=False)
        return fitted, weights(ours)

    run.whole = cache(lambda **more: run(tmp_path_factory.mktemp("cut"), 6, **more)[1])
    return run


@pytest.mark.parametrize("stops", [[1], [3, 5], [2, 3]], ids=str)
def test_a_run_that_stopped_inside_a_batch_ends_with_the_weights_of_one_that_did_not(stops, tmp_path, caplog, cut_fit):
    whole, path = cut_fit.whole(), None
    for stop in stops:
        run, _ = cut_fit(tmp_path, stop, path)
        path = tmp_path / "last.ckpt"
        assert run.global_step == stop
        border = stop - stop % 2
        assert torch.load(path, weights_only=False)["global_step"] == border
        said = f"`max_steps` {stop} fell inside a batch of rollouts: {path} is of step {border}, where that batch began"
        assert (said in caplog.text) == (border != stop)
    run, resumed = cut_fit(tmp_path, 6, path)
    assert run.global_step == 6
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


class Teacher(Callback):
    """When the teacher of RLSD was copied, and how many steps the reward model of PRIME has taken."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.copied_at = getattr(pl_module.credit, "_copied_at", None)
        self.taken = pl_module.second and pl_module.second.steps


@pytest.mark.parametrize(
    "credit",
    [RLSD(refresh_steps=100, decay_steps=1000), PRIME(optimizer=lambda p: SGD(p, lr=1e-3), accuracy=(0, 1))],
    ids=["RLSD", "PRIME"],
)
def test_a_second_fit_of_a_module_begins_anew(credit, tmp_path):
    """Its weights stay. A batch that the first fit has cut must not keep the second one from saving."""
    ours = module(CUT, sampling=Sampling(max_response_length=3), credit=credit)
    for number, most in enumerate((3, 1)):
        data = ArithmeticData(num_train=12, num_val=2, prompts_per_batch=2, eval_prompts_per_batch=2)
        seen, last = Teacher(), LastCheckpoint(folder=str(tmp_path / str(number)))
        trainer(most, seen, last, enable_checkpointing=True).fit(ours, data)
        assert seen.copied_at in (None, 0)
        assert seen.taken in (None, 2 - number), "one step a batch"
        assert (tmp_path / str(number) / "last.ckpt").exists()
        if number == 0:
            assert ours.steps_cut == 1


def test_a_batch_that_was_cut_is_kept_once(tmp_path, cut_fit):
    for most, path, steps in ((3, None, [2, 3]), (6, tmp_path / "last.ckpt", [2, 4, 6])):
        cut_fit(tmp_path, most, path, KeepRollouts(folder=str(tmp_path / "kept")))
        assert sorted(int(file.name.split("_")[1]) for file in (tmp_path / "kept").iterdir()) == steps


def test_a_resumed_run_deals_the_rows_of_split_groups_as_one_that_did_not_stop(tmp_path, cut_fit):
    whole = cut_fit.whole(split_groups=True)
    cut_fit(tmp_path, 3, split_groups=True)
    _, resumed = cut_fit(tmp_path, 6, tmp_path / "last.ckpt", split_groups=True)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    assert any(not torch.equal(weight, resumed[name]) for name, weight in cut_fit.whole().items())


def test_a_checkpoint_from_inside_a_batch_says_that_a_resume_is_not_exact(tmp_path, cut_fit):
    run, _ = cut_fit(tmp_path, 3)
    run.save_checkpoint(tmp_path / "inside.ckpt")
    with pytest.warns(UserWarning, match=r"saved inside a batch of rollouts, at step 3: its last 1 steps are lost"):
        cut_fit(tmp_path / "other", 4, tmp_path / "inside.ckpt")
