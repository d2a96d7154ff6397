"""Every run's options are parsed, and built, before any run starts."""

import json
from pathlib import Path

import pytest
import yaml

from grail_lightning.sweep.grid import read_study
from grail_lightning.sweep.plan import RunPlanner
from tests.sweep.studies import write_study


def planned(file):
    """The plans of all runs of a file."""
    study = read_study(file)
    return RunPlanner(study).plan(study.runs)


def values(plan):
    """The arguments by their names; the last one of a name."""
    return dict(argument.removeprefix("--").partition("=")[::2] for argument in plan.arguments)


def test_a_run_is_the_base_config_with_its_overrides_its_seed_and_its_folder(tmp_path):
    first, second = planned(write_study(tmp_path, seeds=[0, 4]))[1:3]
    given = values(first)
    assert given["config"] == "configs/quickstart.yaml"
    assert given["model.credit"] == "GRAIL"
    assert given["trainer.max_steps"] == "2"
    assert given["seed_everything"] == "0"
    logger = json.loads(given["trainer.logger"])
    assert logger["class_path"].endswith("TensorBoardLogger")
    assert (logger["init_args"]["save_dir"], logger["init_args"]["name"]) == (str(tmp_path / "study"), "GRAIL__sums__0")
    assert logger["init_args"]["version"] == ""
    assert (values(second)["seed_everything"], values(second)["model.credit"]) == ("4", "Uniform")
    assert second.saved["seed_everything"] == 4
    assert second.saved["model"]["credit"]["class_path"].endswith(".Uniform")


@pytest.mark.parametrize(
    ("logger", "classes"),
    [
        (True, ["TensorBoardLogger"]),
        ("CSVLogger", ["CSVLogger"]),
        (
            [{"class_path": f"{kind}Logger", "init_args": {"save_dir": "a"}} for kind in ("TensorBoard", "CSV")],
            ["TensorBoardLogger", "CSVLogger"],
        ),
        (
            {"class_path": "tests.sweep.parts.Elsewhere", "init_args": {"save_dir": "a", "address": "b"}},
            ["Elsewhere", "TensorBoardLogger"],
        ),
        (False, []),
    ],
)
def test_each_logger_writes_to_the_folder_of_the_run(tmp_path, logger, classes):
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    (plan,) = planned(write_study(tmp_path, config=["configs/quickstart.yaml", str(base)], methods={"GRPO": {}}))
    folder = tmp_path / "study" / "GRPO__sums__0"
    if not classes:
        assert values(plan)["trainer.default_root_dir"] == str(folder)
        return
    found = json.loads(values(plan)["trainer.logger"])
    found = found if isinstance(found, list) else [found]
    for one, name in zip(found, classes, strict=True):
        assert name in one["class_path"]
        place = one["init_args"]
        tables = name != "Elsewhere"
        assert Path(place["save_dir"], place["name"]) == folder if tables else place["save_dir"] == str(folder)
        assert tables or place["address"] == "b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": {"A": {"model.credit": "GRIAL"}}},
            "A on sums: `model.credit` must be one of .*Did you mean GRAIL",
        ),
        ({"methods": {"A": {"model.credt": "GRAIL"}}}, "no option `model.credt`. Did you mean `model.credit`"),
        ({"options": {"trainer.max_steps": "many"}}, "`trainer.max_steps` must be an integer, but got 'many'"),
        ({"methods": {"A": {"model.credit": "GRAIL", "model.credit.w_min": 9}}}, "0 ≤ w_min ≤ w_max, but got 9.0"),
        (
            {"grid": {"model.optimizer.lr": [1e-4, "high"]}},
            "GRPO on sums at lr=high: .* must be a number, but got 'high'",
        ),
        ({"config": "nowhere.yaml"}, "nowhere.yaml cannot be read: File does not exist"),
        ({"options": {"data.num_trian": 3}}, "There is no option `data.num_trian`"),
        ({"options": {"checkpoint.dirpath": "x"}}, "`checkpoint.dirpath` must be left out in a sweep, but got x"),
        ({"options": {"export.folder": "x"}}, "`export.folder` must be left out"),
        ({"options": {"trainer.num_nodes": 2}}, "`trainer.num_nodes` must be 1"),
        ({"options": {"trainer.gradient_clip_val": 1}}, "set `--model.execution.max_grad_norm` instead"),
    ],
)
def test_a_wrong_option_is_told_with_its_method_and_task(tmp_path, changes, message):
    file = write_study(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        planned(file)
    assert str(error.value).startswith(f"{file}, ")
    assert "\n" not in str(error.value)


def test_a_folder_with_a_run_of_other_options_is_refused(tmp_path):
    file = write_study(tmp_path)
    plan = planned(file)[0]
    plan.run.folder.mkdir(parents=True)
    (plan.run.folder / "config.yaml").write_text(yaml.safe_dump(dict(plan.saved)))
    assert plan.differing() is None
    write_study(tmp_path, options={"model.optimizer.lr": 3e-4})
    with pytest.raises(ValueError, match=r"GRPO__sums__0 must hold .*lr`: 0.0001 then, 0.0003 now.*`--output`"):
        planned(file)


def test_folders_of_the_same_options_may_be_moved(tmp_path):
    file = write_study(tmp_path)
    before = planned(file)[0]
    write_study(tmp_path, folder=str(tmp_path / "moved"))
    after = planned(file)[0]
    after.run.folder.mkdir(parents=True)
    (after.run.folder / "config.yaml").write_text(yaml.safe_dump(dict(before.saved)))
    assert after.differing() is None


@pytest.mark.parametrize(("devices", "number"), [(1, 1), (2, 2), ("auto", 1), (-1, 1), ("3", 3), ([0, 2], 2)])
def test_the_number_of_devices_is_what_a_run_asks_for(tmp_path, devices, number):
    assert planned(write_study(tmp_path, options={"trainer.devices": devices}))[0].devices == number
