"""The best point of a grid, chosen on runs that are not reported."""

import json
import math

import pytest
from torch.utils.tensorboard import SummaryWriter

from grail_lightning.sweep.choose import choice_file, choose, figure, told
from grail_lightning.sweep.grid import Choice, read_study
from tests.sweep.studies import write_study

GRID = {"model.optimizer.lr": [1e-4, 2e-4, 4e-4]}
# Curves of the held-out accuracy, by learning rate and seed. The last values and the means disagree.
CURVES = {
    (1e-4, 8): [0.6, 0.6, 0.6],
    (1e-4, 9): [0.7, 0.7, 0.7],
    (2e-4, 8): [0.1, 0.5, 0.9],
    (2e-4, 9): [0.2, 0.4, 0.5],
    (4e-4, 8): [0.9, 0.9, 0.1],
    (4e-4, 9): [0.8, 0.8, 0.2],
}


def write_curve(folder, values, first=0):
    """Event files as a run leaves them."""
    with SummaryWriter(str(folder)) as writer:
        for step, value in enumerate(values, start=first):
            writer.add_scalar("val/accuracy", value, step)


@pytest.fixture
def study(tmp_path):
    """A sweep whose choosing runs have left their curves."""

    def make(**choice):
        methods = {"GRAIL": {"grid": GRID}, "GRPO": {}}
        found = read_study(write_study(tmp_path, methods=methods, choose={"seeds": [8, 9]} | choice))
        for run in found.runs:
            if run.choosing and not run.folder.exists():
                write_curve(run.folder, CURVES[run.point["model.optimizer.lr"], run.seed])
        return found

    return make


def test_the_point_with_the_best_last_value_is_chosen(study):
    found = study()
    point = choose(found, found.choice, ("GRAIL", "sums"))
    assert point == {"model.optimizer.lr": 2e-4}, "(0.9 + 0.5) / 2 is more than (0.6 + 0.7) / 2"
    assert told(point, ("GRAIL", "sums"), found) == "GRAIL, sums: lr=0.0002 is best of the grid on the choosing seeds"
    noted = json.loads(choice_file(found, ("GRAIL", "sums")).read_text())
    assert (noted["method"], noted["task"], noted["chosen"]) == ("GRAIL", "sums", "lr=0.0002")
    assert noted["figures"]["lr=0.0002"] == pytest.approx([0.9, 0.5])
    choose(found, found.choice, ("GRAIL", "sums"))
    assert [file.name for file in found.choosing_folder.glob("*.json*")] == ["choice__GRAIL__sums.json"]


def test_the_point_with_the_largest_mean_is_chosen_on_request(study):
    found = study(statistic="mean")
    point = choose(found, found.choice, ("GRAIL", "sums"))
    assert point == {"model.optimizer.lr": 1e-4}, "0.65 is more than (1.9 / 3 + 1.8 / 3) / 2"
    assert "(lr at the edge of the grid)" in told(point, ("GRAIL", "sums"), found)


def test_steps_that_a_resumed_run_logged_twice_count_once(study, tmp_path):
    run = study().runs[0]
    write_curve(run.folder, [0.6, 0.3], first=2)
    assert figure(run, Choice(seeds=())) == pytest.approx(0.3)
    assert figure(run, Choice(seeds=(), statistic="mean")) == pytest.approx((0.6 + 0.6 + 0.6 + 0.3) / 4)


def test_a_run_that_fell_apart_is_never_the_best(study):
    run = study().runs[0]
    write_curve(run.folder, [math.nan], first=3)
    assert figure(run, Choice(seeds=())) == -math.inf


def test_a_curve_that_is_not_there_is_a_mistake_of_the_file(study):
    found = study(by="val/accurcy")
    with pytest.raises(ValueError, match=r"`choose.by` must be the tag of a curve .* has no 'val/accurcy'"):
        choose(found, found.choice, ("GRAIL", "sums"))
