"""The runs of a sweep, and what is wrong with its file."""

import re
from pathlib import Path

import pytest

from grail_lightning.sweep.grid import described, read_study
from tests.sweep.studies import METHODS, write_study

RATES = {"model.optimizer.lr": [1.0e-4, 2.0e-4]}


def names(study):
    return [run.name for run in study.runs]


def test_every_method_runs_on_every_task_with_every_seed(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[3, 5], tasks={"five": None, "ten": {"data.num_terms": 10}}))
    assert names(study) == [
        f"{method}__{task}__{seed}" for seed in (3, 5) for method in ("GRPO", "GRAIL") for task in ("five", "ten")
    ], "seed by seed, so that a sweep that is cut short has compared all methods on the same seeds"
    last = study.runs[-1]
    assert (last.method, last.task, last.seed) == ("GRAIL", "ten", 5)
    assert last.options["model.credit"] == "GRAIL"
    assert last.options["data.num_terms"] == 10
    assert last.folder == tmp_path / "study" / "GRAIL__ten__5"
    assert last.point == {}


def test_a_method_has_seeds_and_a_grid_of_its_own(tmp_path):
    methods = {"A": {"seeds": [7]}, "B": {"grid": RATES | {"model.credit.std": [1, 2]}}}
    study = read_study(write_study(tmp_path, methods=methods))
    of_b = [f"B_lr={lr},_std={std}__sums__0" for lr in ("0.0001", "0.0002") for std in (1, 2)]
    assert names(study) == ["A__sums__7", *of_b]
    assert study.runs[2].point == {"model.optimizer.lr": 1e-4, "model.credit.std": 2}
    assert {run.method for run in study.runs} == {"A", "B"}


def test_a_task_and_a_method_may_change_what_all_have_in_common(tmp_path):
    study = read_study(write_study(tmp_path, tasks={"long": {"trainer.max_steps": 9}}))
    assert [run.options["trainer.max_steps"] for run in study.runs] == [9, 9]


def test_config_files_come_in_the_order_all_task_method(tmp_path):
    methods = {"A": {"config": ["m1.yaml", "m2.yaml"]}}
    study = read_study(write_study(tmp_path, config="base.yaml", methods=methods, tasks={"t": {"config": "t.yaml"}}))
    assert study.runs[0].configs == ("base.yaml", "t.yaml", "m1.yaml", "m2.yaml")
    assert "config" not in study.runs[0].options


def test_a_choice_is_made_on_runs_beside_those_that_are_reported(tmp_path):
    methods = METHODS | {"GRAIL": {"model.credit": "GRAIL", "grid": RATES}}
    study = read_study(write_study(tmp_path, methods=methods, seeds=[0, 1], choose={"seeds": [8, 9]}))
    choosing = [run for run in study.runs if run.choosing]
    assert study.runs[: len(choosing)] == tuple(choosing), "they come first"
    assert [(run.point["model.optimizer.lr"], run.seed) for run in choosing] == [
        (1e-4, 8),
        (1e-4, 9),
        (2e-4, 8),
        (2e-4, 9),
    ]
    assert {run.folder.parent for run in choosing} == {tmp_path / "study_choosing"}
    reported = {run.name: run.point for run in study.runs[len(choosing) :]}
    assert reported == {"GRPO__sums__0": {}, "GRAIL__sums__0": None, "GRPO__sums__1": {}, "GRAIL__sums__1": None}


def test_names_become_folders_that_a_shell_need_not_quote(tmp_path):
    study = read_study(write_study(tmp_path, methods={"GRAIL (mean ½) / 2": {}, "../x": {}}))
    for run in study.runs:
        assert re.fullmatch(r"[\w.,=+-]+", run.name)
        assert run.folder.parent == tmp_path / "study"


def test_another_folder_is_taken_from_the_command_line(tmp_path):
    study = read_study(write_study(tmp_path, folder=None), Path("elsewhere"))
    assert study.runs[0].folder == Path("elsewhere/GRPO__sums__0")


def test_a_point_is_described_by_the_last_parts_of_its_options():
    point = {"model.optimizer.lr": 1e-4, "model.credit": "GRAIL", "model.x": [1], "model.y": True, "model.z": 0.1}
    assert described(point) == "lr=0.0001, credit=GRAIL, x=[1], y=true, z=0.1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methds": {}}, "no key `methds` .* Did you mean `methods`?"),
        ({"folder": None}, "`folder` .* must be the folder of the runs"),
        ({"folder": 3}, "`folder` .* but got 3"),
        ({"methods": {}}, "`methods` .* at least one name"),
        ({"methods": ["GRPO"]}, "`methods` .* at least one name"),
        ({"methods": {1: {}}}, "name under `methods` .* got 1. Quote it"),
        ({"methods": {"a\nb": {}}}, "text in one line"),
        ({"methods": {"A": "GRAIL"}}, "`methods.A` .* must hold options .*'GRAIL'"),
        ({"methods": {"A": {3: 4}}}, "`methods.A` .* must hold options"),
        ({"methods": {"A": {"--model.credit": "GRAIL"}}}, "without dashes"),
        ({"methods": {"A": {"seed_everything": 1}}}, "`seed_everything` must not be set .*List the seeds"),
        ({"options": {"ckpt_path": "last"}}, "`ckpt_path` must not be set by `options`"),
        ({"tasks": {"t": {"trainer.logger.name": "x"}}}, "`trainer.logger.name` must not be set by `tasks.t`"),
        ({"tasks": {"t": {"model.credit": "LESS"}}}, "`model.credit` must be set once, .* tasks.t and methods.GRPO"),
        ({"grid": {"model.credit": ["LESS", "UCAS"]}}, "`model.credit` must be set once, .*methods.GRPO and the grid"),
        ({"grid": {"model.optimizer.lr": 1e-4}}, "`grid.model.optimizer.lr` .* list of different values"),
        ({"grid": {"model.optimizer.lr": [1e-4, 0.0001]}}, "list of different values"),
        ({"seeds": None}, "`seeds` of 'GRPO' .* got None"),
        ({"seeds": [0, 0]}, "different integers"),
        ({"seeds": [-1]}, "integers from 0 on"),
        ({"seeds": [True]}, "integers from 0 on"),
        ({"seeds": 8}, "list of different integers"),
        ({"methods": {"A": {"seeds": []}}}, "`seeds` of 'A'"),
        ({"config": 5}, "`config` .* must be the path of a config file"),
        ({"choose": {"seeds": [0]}, "grid": RATES}, "`choose.seeds` .* 'GRPO' reports 0, too"),
        ({"choose": {"by": "val/accuracy"}, "grid": RATES}, "`choose.seeds`.* got None"),
        ({"choose": {"seeds": [1], "statistic": "best"}}, "last or mean, but got 'best'"),
        ({"choose": {"seeds": [1], "most": 1}}, "but got most"),
        ({"choose": {"seeds": [1], "by": 1}}, "the tag of a curve"),
        ({"methods": {"a b": {}, "a_b": {}}}, "a b, sums, seed 0 and a_b, sums, seed 0 both have .*a_b__sums__0"),
        ({"methods": {"GRAIL": {}, "Grail": {}}}, "folders of their own"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_in_one_line(tmp_path, changes, message):
    file = write_study(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        read_study(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


def test_a_file_that_is_no_yaml_is_told_with_its_line(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("methods: {GRPO: [}\n")
    with pytest.raises(ValueError, match=r"^The file of a sweep .*study.yaml, line 1, column 18"):
        read_study(file)
    with pytest.raises(ValueError, match=r"^The file of a sweep must name a YAML file, but .*File does not exist"):
        read_study(tmp_path / "none.yaml")
