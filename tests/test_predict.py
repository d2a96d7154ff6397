"""`predict` on the command line: several credit methods on one sampling, kept rollouts, and the page of both."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from grail_lightning import ArithmeticTask, Kept
from grail_lightning.core.data.tables import kept_rollouts
from tests.app.views.test_page import data_of
from tests.shell import EVALUATED, RUN, SHORT, fails, main

PREDICT = ["predict", "--config=configs/saliency.yaml", "--data.num_test=2", "--evaluation.num_samples=4"]
PREDICT += ["--trainer.enable_progress_bar=false"]
FILE = "runs/saliency/predictions.parquet"


def test_weights_include_what_a_method_adds_to_the_advantage(tmp_path, monkeypatch):
    """The changes of value along a row add up to its outcome less the mean of its group."""
    monkeypatch.chdir(tmp_path)
    main([*PREDICT, "--model.credit=TreeAdvantage", "--predictions.page=false", "--data.eval_prompts_per_batch=1"])
    rows = pq.read_table(FILE).to_pylist()
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4, "of two batches"
    groups = [[row["correct"] for row in rows[:4]], [row["correct"] for row in rows[4:]]]
    assert any(0 < sum(group) < 4 for group in groups), "some group has right and wrong rollouts"
    for row in rows:
        added = sum(weight - 1 for weight in row["weights"]) * (1 if row["correct"] else -1)
        assert added == pytest.approx(row["correct"] - sum(groups[row["group"]]) / 4, abs=1e-5)


def test_compared_methods_run_in_the_precision_of_the_first_one(empty_folder):
    same = ["--model.credit=HighEntropy", "--predictions.compare+=HighEntropy", "--predictions.page=false"]
    main([*PREDICT, *same, "--trainer.precision=bf16-mixed"])
    table = pq.read_table(FILE)
    assert table["scores"].to_pylist() == table["scores.HighEntropy (2)"].to_pylist()


def test_several_methods_weight_the_same_rollouts_as_each_would_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = ["--model.credit=GRAIL", "--model.credit.std=0.3", "--model.credit.gate=all"]
    others = [f"--predictions.compare+={name}" for name in ("HighEntropy", "OARGradient", "HighEntropy")]
    main([*PREDICT, *first, *others, "--predictions.compare.share=0.5"])
    table = pq.read_table(FILE)
    names = ["HighEntropy share=0.2", "OARGradient", "HighEntropy share=0.5"]
    found = [name for name in table.column_names if name.startswith("weights")]
    assert found == ["weights", *(f"weights.{name}" for name in names)]
    assert set(table["method"].to_pylist()) == {"GRAIL"}
    assert len(table) == 8
    page = data_of((tmp_path / FILE).with_suffix(".html").read_text(encoding="utf-8"))
    assert page["methods"] == ["GRAIL", *names]
    assert [len(group["rollouts"]) for group in page["groups"]] == [4, 4]
    assert page["groups"][0]["rollouts"][0]["steps"], "the task's labels are there"
    # One method alone, on the same seed: the same rollouts, and the same weights.
    main([*PREDICT, "--model.credit=HighEntropy", "--model.credit.share=0.5", "--predictions.page=false"])
    alone = pq.read_table(FILE)
    assert alone["token_ids"] == table["token_ids"]
    assert alone["weights"].to_pylist() == table["weights.HighEntropy share=0.5"].to_pylist()
    assert alone["weights"] != table["weights"]
    # The saved config repeats all methods.
    compared = yaml.safe_load((tmp_path / "runs/saliency/config_predict.1.yaml").read_text())["predictions"]["compare"]
    classes = [method["class_path"].rpartition(".")[2] for method in compared]
    assert classes == ["HighEntropy", "OARGradient", "HighEntropy"]


def test_predict_shows_the_newest_rollouts_of_a_run(tmp_path, monkeypatch, capsys):
    """One option on the run's own config; the tokens are those that were sampled."""
    monkeypatch.chdir(tmp_path)
    main(["fit", *SHORT, "--trainer.callbacks+=KeepRollouts", "--trainer.limit_val_batches=0"])
    newest = max((RUN / "rollouts").glob("*.parquet"))
    kept = pq.read_table(newest)
    # A strength that falls from 1 to 0 over three optimiser steps, of which the checkpoint has taken two.
    falling = ["--model.credit=RLSD", "--model.credit.strength=1", "--model.credit.decay_steps=3"]
    main(["predict", *EVALUATED, "--ckpt_path=last", "--data.kept.newest=9", *falling])
    predicted = pq.read_table(RUN / "predictions.parquet")
    assert len(predicted) == 8, "two groups of four; a third would be cut"
    assert predicted["group"].to_pylist() == [0] * 4 + [1] * 4
    for column in ("prompt", "reference", "response", "token_ids", "correct", "finished", "dataset"):
        assert predicted[column].to_pylist() == kept[column].to_pylist()[:8], column
    largest = max(abs(weight - 1) for weights in predicted["weights"].to_pylist() for weight in weights)
    assert largest == pytest.approx(0.2 / 3), "the clip of RLSD, times the strength"
    assert data_of((RUN / "predictions.html").read_text(encoding="utf-8"))["groups"][0]["rollouts"][0]["steps"]
    (tmp_path / "empty").mkdir()
    said = fails(capsys, "predict", *EVALUATED, f"--data.kept.folder={tmp_path / 'empty'}")
    assert "`data.kept` needs rollouts that a training run kept" in said


def test_kept_files_of_an_earlier_version_are_named(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "step_00000001_rank_00000.parquet")
    message = r"step_00000001_rank_00000.parquet must have the columns .* but has no `step`, `rank`, `dataset`"
    with pytest.raises(ValueError, match=message):
        kept_rollouts(Kept(folder=str(tmp_path)), ArithmeticTask(), None)
    with pytest.raises(ValueError, match=r"`data\.kept\.newest` must lie in \[1, inf\), but got 0"):
        Kept(newest=0)
