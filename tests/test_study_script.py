"""`scripts/study.py`: the runs of a study, the choice of points, and the table of finished runs."""

import importlib
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from grail_lightning.app.results.differences import read_scalars
from tests.shell import refusal
from tests.sweep_files import fork_runs, records, write


@pytest.fixture
def study(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("study")


def call(study, file):
    """The exit code of a call in this process."""
    with pytest.raises(SystemExit) as end:
        study.main([str(file)])
    return end.value.code


def test_a_choice_runs_each_point_on_seeds_of_its_own_first(study, tmp_path):
    grid = {"model.optimizer.lr": [1e-4, 2e-4]}
    runs = study.read_study(write(tmp_path, grid=grid, choose={"seeds": [100]}))[0].runs
    assert [(run.method, run.seed, run.point, run.choosing) for run in runs] == [
        ("GRPO", 100, {"model.optimizer.lr": 1e-4}, True),
        ("GRPO", 100, {"model.optimizer.lr": 2e-4}, True),
        ("wide GRAIL", 100, {"model.optimizer.lr": 1e-4}, True),
        ("wide GRAIL", 100, {"model.optimizer.lr": 2e-4}, True),
        ("GRPO", 0, {}, False),
        ("wide GRAIL", 0, {}, False),
    ]
    assert [run.waits for run in runs] == [not run.choosing for run in runs]
    assert runs[0].folder.parent == tmp_path / "study_choosing"


def test_a_method_with_one_point_has_nothing_to_choose_and_may_have_other_seeds(study, tmp_path):
    methods = {"GRPO": {"seeds": [0, 1]}, "GRAIL": {"model.credit": "GRAIL", "grid": {"model.optimizer.lr": [1e-4]}}}
    grid = {"model.optimizer.lr": [1e-4, 2e-4]}
    runs = study.read_study(write(tmp_path, methods=methods, grid=grid, choose={"seeds": [100]}))[0].runs
    assert [(run.folder.name, run.choosing, run.waits) for run in runs] == [
        ("GRPO_lr=0.0001__sums__100", True, False),
        ("GRPO_lr=0.0002__sums__100", True, False),
        ("GRPO__sums__0", False, True),
        ("GRAIL_lr=0.0001__sums__0", False, False),
        ("GRPO__sums__1", False, True),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chose": {}}, "Did you mean `choose`?"),
        ({"grid": {"model.optimizer.lr": [1, 2]}, "choose": {"seeds": [0]}}, "other seeds"),
        ({"results": {"file": "table.csv", "curves": "val/accuracy"}}, "`curves`, a list"),
        ({"choose": {"by": "val/accuracy"}}, "`choose` must hold `seeds`"),
        ({"choose": {"seeds": [5], "statistic": "max"}}, "`statistic`, last or mean"),
        ({"choose": {"seeds": [5], "metric": "a"}}, "`choose` must hold `seeds`"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(study, tmp_path, capsys, changes, said):
    assert said in refusal(capsys, study.main, str(write(tmp_path, **changes)))


def test_runs_whose_point_is_not_chosen_are_parsed_with_one_of_their_grid(study, tmp_path, capsys):
    (tmp_path / "data.yaml").write_text("data: ArithmeticData")
    grid = {"model.policy": ["arithmetic"], "model.optimizer.lr": [1e-4, 2e-4]}  # No policy is set but here.
    file = write(tmp_path, config=str(tmp_path / "data.yaml"), grid=grid, choose={"seeds": [100]})
    study.main([str(file), "--list"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("at the point that will be chosen")
    assert "waits for" in refusal(capsys, study.main, str(file), "--index=4")


def test_the_point_that_is_best_on_other_seeds_is_reported(study, tmp_path, capsys, monkeypatch):
    fork_runs(monkeypatch)
    grid = {"model.optimizer.lr": [0.1, 1e-4]}  # The first rate ruins the policy.
    table = tmp_path / "tables" / "rates.csv"
    results = {"file": str(table), "curves": ["val/accuracy", "policy/entropy_sampled"]}
    choose = {"seeds": [100], "statistic": "mean"}
    file = write(tmp_path, methods={"GRPO": {}}, grid=grid, choose=choose, results=results)
    assert "waits for" in refusal(capsys, study.main, str(file), "--index=2")
    assert call(study, file) == 0
    assert records(file)["GRPO__sums__0"]["point"] == {"model.optimizer.lr": 1e-4}
    assert all(record["choosing"] for record in records(file, "study_choosing").values())
    choice = json.loads((tmp_path / "study_choices" / "GRPO__sums.json").read_text())
    assert choice["chosen"] == "lr=0.0001"
    assert len(choice["figures"]) == 2
    # The table is enough: without the folders nothing is run again, and the same point is chosen.
    kept, rows = table.read_text(), {row["run"]: row for row in study.read_results(table)}
    assert list(study.curve(rows["GRPO__sums__0"], "val/accuracy")) == [0, 1]
    assert study.curve(rows["GRPO__sums__0"], "val/accuracy") == pytest.approx(
        read_scalars(tmp_path / "study" / "GRPO__sums__0", "val/accuracy"), abs=1e-6
    )
    shutil.rmtree(tmp_path / "study")
    shutil.rmtree(tmp_path / "study_choosing")
    assert call(study, file) == 0
    assert json.loads((tmp_path / "study_choices" / "GRPO__sums.json").read_text()) == choice
    assert not (tmp_path / "study").exists()
    assert table.read_text() == kept
    assert "GRPO, sums: lr=0.0001 is best" in capsys.readouterr().out
    # Another point is best now than the one that the reported run has, as after a change of the grid.
    swapped = pd.read_csv(table)
    swapped.loc[swapped["choosing"], "val/accuracy"] = swapped.loc[swapped["choosing"], "val/accuracy"].to_numpy()[::-1]
    swapped.to_csv(table, index=False)
    assert call(study, file) == 2
    assert "a row of one" in capsys.readouterr().err
    table.write_text(kept)
    changed = write(tmp_path, methods={"GRPO": {"model.credit": "GRAIL"}}, grid=grid, choose=choose, results=results)
    assert "a row of one" in refusal(capsys, study.main, str(changed))
    other = results | {"curves": ["val/accuracy"]}
    renamed = write(tmp_path, methods={"GRPO": {}}, grid=grid, choose=choose, results=other)
    assert "Name another file" in refusal(capsys, study.main, str(renamed))
