import pyarrow.parquet as pq
import pytest

from grail_lightning.callbacks import PredictionWriter
from grail_lightning.credit import DGPO, HighEntropy, Uniform
from tests.callbacks.scripted import Scripted, box, loader, prompts, run
from tests.views.test_page import data_of


def _say(prompt, k, step):
    """One text with a box in the middle, one with two boxes, one without any."""
    return [f"so {box(1)} .", f"{box(7)} or {box(2)}", "none"][int(prompt.reference) - 1]


@pytest.fixture
def written(tmp_path):
    module = Scripted(_say)
    trainer = run(-1, PredictionWriter(), default_root_dir=tmp_path)
    trainer.predict(module, loader(prompts(2, "set"), [prompts(3, "set")[2]], []), return_predictions=False)
    assert {p.name for p in tmp_path.iterdir()} == {"predictions.parquet", "predictions.html"}
    return module.tokenizer, pq.read_table(tmp_path / "predictions.parquet").to_pylist()


def test_one_row_a_rollout_with_its_text_and_verdict(written):
    _, rows = written
    assert [row["response"] for row in rows] == [f"so {box(1)} .", f"{box(7)} or {box(2)}", "none"]
    assert [row["prompt"] for row in rows] == ["Compute 0+1.", "Compute 1+1.", "Compute 2+1."]
    assert [row["status"] for row in rows] == ["right", "right", "missing"]
    assert [row["correct"] for row in rows] == [True, True, False]
    assert [row["reward"] for row in rows] == [1, 1, 0]


def test_tokens_weights_and_scores_are_as_long_as_the_response(written):
    tokenizer, rows = written
    for row in rows:
        n = row["num_tokens"]
        assert row["token_ids"] == tokenizer(row["response"])["input_ids"] + [tokenizer.eos_token_id]
        assert row["weights"] == [float(k) for k in range(n)]
        assert row["scores"] == [2.0 * k for k in range(n)]
        assert "".join(row["tokens"][:-1]) == row["response"]
        pieces = [row["response"][a:b] for a, b in zip(row["token_starts"], row["token_stops"], strict=True)]
        assert pieces == [*row["tokens"][:-1], ""]


def test_the_answer_is_located_in_characters_and_in_tokens(written):
    _, rows = written
    for row, answer in zip(rows[:2], (box(1), box(2)), strict=True):
        start = row["response"].rindex(answer)
        assert (row["box_start"], row["box_stop"]) == (start, start + len(answer))
        first, last = row["box_first_token"], row["box_last_token"]
        assert row["token_starts"][first] <= start < row["token_stops"][first]
        assert row["token_starts"][last] < row["box_stop"] <= row["token_stops"][last]
        assert not row["fallback"]
    nowhere = ("box_start", "box_stop", "box_first_token", "box_last_token")
    assert [rows[2][name] for name in nowhere] == [None] * 4
    assert rows[2]["fallback"]


def test_credit_without_scores_leaves_them_empty(tmp_path):
    class NoScores(Scripted):
        def predict_step(self, problems, batch_idx, dataloader_idx=0):
            output = super().predict_step(problems, batch_idx)
            output.weights = None
            return output

    file = tmp_path / "deep" / "credit.parquet"
    run(-1, PredictionWriter(str(file))).predict(NoScores(_say), loader(prompts(1)), return_predictions=False)
    (row,) = pq.read_table(file).to_pylist()
    assert (row["weights"], row["scores"], row["fallback"]) == (None, None, None)


def test_a_prediction_that_breaks_off_leaves_no_file_that_looks_complete(tmp_path):
    class Breaks(Scripted):
        def predict_step(self, problems, batch_idx, dataloader_idx=0):
            if batch_idx:
                raise RuntimeError("boom")
            return super().predict_step(problems, batch_idx)

    writer = PredictionWriter()
    with pytest.raises(RuntimeError, match="boom"):
        run(-1, writer, default_root_dir=tmp_path).predict(Breaks(_say), loader(prompts(1), prompts(1)))
    assert not (tmp_path / "predictions.parquet").exists()


def _shown(page):
    return sum(len(group["rollouts"]) for group in data_of(page.read_text(encoding="utf-8"))["groups"])


def test_further_methods_have_columns_of_their_own_and_names_that_tell_them_apart(tmp_path):
    methods = [HighEntropy(share=0.5), Uniform(), HighEntropy(share=0.2)]
    writer = PredictionWriter(compare=methods, page=False)
    run(-1, writer, default_root_dir=tmp_path).predict(Scripted(_say), loader(prompts(2)), return_predictions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.parquet"]
    for row in pq.read_table(tmp_path / "predictions.parquet").to_pylist():
        n = row["num_tokens"]
        assert row["method"] == "Uniform"
        assert row["weights.Uniform (2)"] == [1.0] * n
        for share in (0.2, 0.5):
            assert set(row[f"weights.HighEntropy share={share}"]) <= {0.0, 1.0}
            assert len(row[f"scores.HighEntropy share={share}"]) == n


def test_a_method_that_needs_the_reference_has_to_be_the_first_one():
    writer = PredictionWriter(compare=[DGPO()])
    with pytest.raises(ValueError, match="`DGPO` needs the frozen reference") as error:
        run(-1, writer).predict(Scripted(_say), loader(prompts(2)))
    assert "--model.credit=DGPO --model.credit=Uniform" in str(error.value)


def test_the_labelled_steps_are_there(tmp_path):
    def say(prompt, k, step):
        return f"0+1=2\n{box(2)}"

    trainer = run(-1, PredictionWriter(), default_root_dir=tmp_path)
    trainer.predict(Scripted(say), loader(prompts(1)), return_predictions=False)
    (row,) = pq.read_table(tmp_path / "predictions.parquet").to_pylist()
    assert (row["step_starts"], row["step_stops"], row["step_kinds"]) == ([0], [5], ["slip"])


def test_earlier_predictions_are_kept_under_a_number(tmp_path, caplog):
    file = tmp_path / "predictions.parquet"
    for number in (1, 2, 3):
        trainer = run(-1, PredictionWriter(), default_root_dir=tmp_path)
        trainer.predict(Scripted(_say), loader(prompts(number)), return_predictions=False)
    kept = {path.name: pq.read_metadata(path).num_rows for path in tmp_path.glob("*.parquet")}
    assert kept == {"predictions.parquet": 3, "predictions.1.parquet": 1, "predictions.2.parquet": 2}
    pages = {path.name: _shown(path) for path in tmp_path.glob("*.html")}
    assert pages == {"predictions.html": 3, "predictions.1.html": 1, "predictions.2.html": 2}
    assert f"The predictions that were in {file} are now in {tmp_path / 'predictions.2.parquet'}." in caplog.text
    assert "`predict` uses the policy as it was loaded from arithmetic" in caplog.text


def test_the_file_and_its_page_have_two_names():
    with pytest.raises(ValueError, match=r"`predictions\.file` must not have the name of the page, but got x\.html"):
        PredictionWriter("x.html")
    assert PredictionWriter("x.html", page=False).file == "x.html"
