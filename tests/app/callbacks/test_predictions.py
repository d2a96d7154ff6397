"""What `predict` writes: a row for each rollout, with its tokens, weights and spans, and a page."""

import pyarrow.parquet as pq
import pytest

from grail_lightning import PredictionWriter
from grail_lightning.core.records.columns import OPTIONAL, PREDICTION
from grail_lightning.credit import HighEntropy, Uniform
from tests.app.callbacks.scripted import Scripted, box, loader, prompts, run


def _say(prompt, k, step):
    """One text with a box in the middle and a labelled step, one with two boxes, one without any."""
    return [f"0+1=2\nso {box(1)} .", f"{box(7)} or {box(2)}", "none"][int(prompt.reference) - 1]


def _predict(folder, writer, *batches, module=None):
    trainer = run(-1, writer, default_root_dir=folder)
    trainer.predict(module or Scripted(_say), loader(*batches), return_predictions=False)
    return pq.read_table(folder / "predictions.parquet")


def test_a_row_has_a_rollouts_text_verdict_tokens_weights_answer_and_steps(tmp_path):
    table = _predict(tmp_path, PredictionWriter(), prompts(2, "set"), [prompts(3, "set")[2]], [])
    assert table.column_names == [name for name in PREDICTION if name not in OPTIONAL]
    rows = table.to_pylist()
    assert {path.name for path in tmp_path.iterdir()} == {"predictions.parquet", "predictions.html"}
    assert [row["prompt"] for row in rows] == ["Compute 0+1.", "Compute 1+1.", "Compute 2+1."]
    assert [row["response"] for row in rows] == [f"0+1=2\nso {box(1)} .", f"{box(7)} or {box(2)}", "none"]
    assert [row["status"] for row in rows] == ["right", "right", "missing"]
    assert [row["reward"] for row in rows] == [1, 1, 0]
    assert [row["fallback"] for row in rows] == [False, False, True]
    tokenizer = Scripted(_say).tokenizer
    for row in rows:
        n = row["num_tokens"]
        assert row["token_ids"] == tokenizer(row["response"])["input_ids"] + [tokenizer.eos_token_id]
        assert row["weights"] == [float(k) for k in range(n)]
        assert row["scores"] == [2.0 * k for k in range(n)]
        assert "".join(row["tokens"][:-1]) == row["response"]
        pieces = [row["response"][a:b] for a, b in zip(row["token_starts"], row["token_stops"], strict=True)]
        assert pieces == [*row["tokens"][:-1], ""]
    for row, answer in zip(rows[:2], (box(1), box(2)), strict=True):
        start = row["response"].rindex(answer)
        assert (row["box_start"], row["box_stop"]) == (start, start + len(answer))
        first, last = row["box_first_token"], row["box_last_token"]
        assert row["token_starts"][first] <= start < row["token_stops"][first]
        assert row["token_starts"][last] < row["box_stop"] <= row["token_stops"][last]
    nowhere = ("box_start", "box_stop", "box_first_token", "box_last_token")
    assert [rows[2][name] for name in nowhere] == [None] * 4
    assert [rows[0][name][0] for name in ("step_starts", "step_stops", "step_kinds")] == [0, 5, "slip"]


def test_earlier_predictions_are_kept_under_a_number(tmp_path):
    _predict(tmp_path, PredictionWriter(), prompts(2))
    before = {file.suffix: file.read_bytes() for file in tmp_path.iterdir()}
    _predict(tmp_path, PredictionWriter(), prompts(3))
    assert {file.suffix: file.read_bytes() for file in tmp_path.glob("predictions.1.*")} == before


def test_a_prediction_that_breaks_off_leaves_no_file_that_looks_complete(tmp_path):
    class Breaks(Scripted):
        def predict_step(self, problems, batch_idx, dataloader_idx=0):
            if batch_idx:
                raise RuntimeError("boom")
            return super().predict_step(problems, batch_idx)

    with pytest.raises(RuntimeError, match="boom"):
        _predict(tmp_path, PredictionWriter(), prompts(1), prompts(1), module=Breaks(_say))
    assert not (tmp_path / "predictions.parquet").exists()


def test_further_methods_have_columns_of_their_own_and_names_that_tell_them_apart(tmp_path):
    methods = [HighEntropy(share=0.5), Uniform(), HighEntropy(share=0.2)]
    row = _predict(tmp_path, PredictionWriter(compare=methods, page=False), prompts(1)).to_pylist()[0]
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.parquet"]
    assert row["method"] == "Uniform"
    assert row["weights.Uniform (2)"] == [1.0] * row["num_tokens"]
    shares = [sum(row[f"weights.HighEntropy share={share}"]) / row["num_tokens"] for share in (0.2, 0.5)]
    assert 0.2 <= shares[0] < shares[1] < 0.7
