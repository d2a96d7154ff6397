"""Rollouts of several turns as people see and keep them: files, predictions with their page, samples and pictures."""

import dataclasses
import json

import pyarrow.parquet as pq
import pytest
import torch

from grail_lightning import KeepRollouts, Kept, PredictionWriter, StepOutput, read_samples
from grail_lightning.app.callbacks.credit_plots import _shown, _text
from grail_lightning.app.callbacks.responses import response_lines
from grail_lightning.app.callbacks.samples import sample_rows
from grail_lightning.app.results.records import append_samples
from grail_lightning.core.data.tables import kept_rollouts
from grail_lightning.core.engines.base import given_batch
from grail_lightning.core.records.columns import OPTIONAL, SAMPLE, TRAINING
from grail_lightning.core.records.episode import transcript
from tests.app.callbacks.scripted import TASK, Scripted, box, loader, prompts, run
from tests.app.views.test_page import data_of
from tests.batches import in_turns

TOLD = f" 1+1=3\n{box(7)} "  # A tool's result that looks like an answer and a step.
TEXTS = [["0+1=1\n", TOLD, "1+1=2\n", " 4", f"so {box(1)}"], [f"1+1=2 {box(2)}"]]


class Talks(Scripted):
    """Rollouts of three turns and of one."""

    def __init__(self, texts=TEXTS):
        super().__init__(None, updates=1)
        self.texts = texts

    def rollouts(self, problems, num_samples):
        asked = [problem for problem in problems for _ in range(num_samples)]
        rows = [self.texts[k % len(self.texts)] for k in range(len(asked))]
        made = in_turns(self.policy, asked, rows)
        # An environment puts a text before the first turn.
        added = torch.where(made.attention_mask[:, : made.prompt_width], made.input_ids[:, : made.prompt_width] + 1, 0)
        made = made.replace(input_ids=torch.cat([added.int(), made.response_ids], 1))
        made = made.replace(group=torch.arange(len(made)) // num_samples)
        return self.graded(made)


def _predicted(folder, module, *batches):
    writer = PredictionWriter()
    run(-1, writer, default_root_dir=folder).predict(module, loader(*batches), return_predictions=False)
    return pq.read_table(folder / "predictions.parquet")


def test_kept_rollouts_are_given_back_as_they_were(tmp_path):
    module = Talks()
    run(1, KeepRollouts(), default_root_dir=tmp_path).fit(module, loader(prompts(2)))
    (file,) = (tmp_path / "rollouts").iterdir()
    table = pq.read_table(file)
    assert table.column_names == [*TRAINING]
    kept = Kept(folder=str(tmp_path / "rollouts"))
    (found,) = kept_rollouts(kept, TASK, None)
    made, back = module.rollouts(prompts(2), 2), given_batch(module.policy, found.prompts)
    for name in ("input_ids", "attention_mask", "response_ids", "response_mask", "turn", "finished"):
        assert torch.equal(getattr(made, name), getattr(back, name)), name
    assert back.texts == made.texts == [f"so {box(1)}", TEXTS[1][0]] * 2
    assert back.episodes == made.episodes
    rows = table.to_pylist()
    facts = [[row[name] for name in ("num_turns", "num_calls", "num_invalid_calls", "end")] for row in rows[:2]]
    assert facts == [[3, 2, 0, "answered"], [1, 0, 0, "answered"]]
    assert [row["transcript"] for row in rows] == [transcript(episode) for episode in made.episodes]
    # Text alone is refused; a response of one turn stays what it was.
    alone = dataclasses.replace(prompts(1)[0], columns={"response": "a", "num_invalid_calls": 0})
    with pytest.raises(ValueError, match=r"must have the columns .*`response_turns`.* by `data.kept`"):
        given_batch(module.policy, [alone])
    plain = given_batch(module.policy, [dataclasses.replace(alone, columns={"response": "a"})])
    assert (plain.turn, plain.episodes) == (None, None)


def test_where_only_some_rollouts_have_turns_the_others_lack_them(tmp_path):
    mixed = Talks()
    made = mixed.rollouts
    plain = {"turn": None, "episodes": None}
    mixed.rollouts = lambda problems, n: made(problems, n).replace(**(plain if len(problems) == 1 else {}))
    rows = _predicted(tmp_path, mixed, prompts(1), prompts(2)).to_pylist()
    assert [row["num_turns"] for row in rows] == [None, 3, 1]
    assert [row["turns"] is None for row in rows] == [True, False, False]


def test_predictions_and_their_page_show_each_turn_with_its_credit(tmp_path):
    module = Talks()
    rows = _predicted(tmp_path, module, prompts(2)).to_pylist()
    batch = module.rollouts(prompts(2), 1)
    assert [row["response"] for row in rows] == [f"so {box(1)}", TEXTS[1][0]]
    # The tokens are the whole rollout; the answer and the steps are looked for in the last turn.
    assert ["".join(row["tokens"][:-1]) for row in rows] == ["".join(texts) for texts in TEXTS]
    told = [[turn < 0 for turn in row["turns"]] for row in rows]
    assert told == [[*(batch.valid_mask & ~batch.response_mask)[k, : len(own)].tolist()] for k, own in enumerate(told)]
    for row, own in zip(rows, told, strict=True):
        assert [weight is None for weight in row["weights"]] == own
        assert row["response"][row["box_start"] : row["box_stop"]].startswith("\\boxed")
        assert row["turns"][row["box_first_token"]] == max(row["turns"])
    steps = [[row["response"][a:b] for a, b in zip(row["step_starts"], row["step_stops"], strict=True)] for row in rows]
    assert steps == [["so "], ["1+1=2 "]]
    # The page reads the columns; tests/app/views shows what it makes of them.
    groups = data_of((tmp_path / "predictions.html").read_text(encoding="utf-8"))["groups"]
    first, second = (group["rollouts"][0] for group in groups)
    assert "".join(first["pieces"][:-1]) == "".join(TEXTS[0])
    assert first["outside"] == [len(first["pieces"]) - 1]
    assert first["turn_of"] == rows[0]["turns"]
    assert [turn["score"] for turn in first["turns"]] == [0.25] * 3
    assert [turn["calls"] for turn in first["turns"]] == [[["find", "done", TOLD]], [["find", "done", " 4"]], []]
    assert (first["end"], second["end"], len(second["turns"])) == ("answered", "answered", 1)
    assert [len(shown["credit"][0]["turns"]) for shown in (first, second)] == [3, 1]


def test_the_panel_and_samples_have_the_turns_and_lines_of_others_stay_as_they_are(tmp_path):
    batch = Talks().rollouts(prompts(2), 1)
    shown, told = _text(StepOutput(batch), 0), transcript(batch.episodes[0])
    assert shown.partition("\n")[0].endswith(" tokens, 3 turns, 2 calls, end: answered")
    assert f"    {box(7)} " in told.splitlines()
    assert "\n".join(f"    {line}" for line in told.splitlines()) in shown
    made, plain = sample_rows(batch, [0, 1]), sample_rows(batch.replace(turn=None, episodes=None), [0, 1])
    append_samples(tmp_path, 0, [*made, *plain])
    assert [*made[0]] == [*SAMPLE]
    assert list(read_samples(tmp_path)) == [dict.fromkeys(SAMPLE) | row for row in (*made, *plain)]
    facts = [[row[name] for name in ("num_turns", "num_calls", "num_invalid_calls", "end")] for row in made]
    assert facts == [[3, 2, 0, "answered"], [1, 0, 0, "answered"]]
    assert made[0]["transcript"] == told
    line = (tmp_path / "rank_00000.jsonl").read_text().splitlines()[2]
    assert [*json.loads(line)] == [name for name in SAMPLE if name not in OPTIONAL]
    assert '"prediction": "1"' in line


def test_a_rollout_without_an_environment_is_told_as_in_a_batch_without_one():
    batch = Talks().rollouts(prompts(2), 1)
    plain = batch.replace(turn=None, episodes=None)
    assert _text(StepOutput(batch), 1) == _text(StepOutput(plain), 1)
    assert _text(StepOutput(batch), 0) != _text(StepOutput(plain), 0)
    assert response_lines(batch, 1) == response_lines(plain, 1)
    assert response_lines(batch, 0) != response_lines(plain, 0)


def test_a_picture_has_the_whole_rollout_and_no_weight_where_nothing_was_sampled():
    module = Talks([[f"ä0+1=1\n{box(9)}", f"ö{TOLD}", f"0+1=2\nso {box(1)}"]])
    batch = module.rollouts(prompts(1), 1)
    shown = _shown(StepOutput(batch), 0, torch.ones(batch.response_ids.shape[1]) * 2, module.tokenizer)
    assert shown.text == "".join(module.texts[0])
    assert shown.text[slice(*shown.answer)] == box(1)
    assert [shown.text[step.start : step.stop] for step in shown.steps] == ["0+1=2", "so "]
    sampled = batch.response_mask[0, batch.valid_mask[0]].tolist()
    assert shown.weights == [2 if own else None for own in sampled]
    assert shown.text[slice(*shown.tokens[sampled.index(False)])] == "ö"
