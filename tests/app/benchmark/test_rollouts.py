"""Stored rollouts are those that a run would have: sampled once, graded and played anew here."""

import hashlib
import json
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from grail_lightning.app.benchmark.labels import read_labels
from grail_lightning.app.benchmark.replay import turns_of
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, open_world
from grail_lightning.app.benchmark.stored import read_arrays
from grail_lightning.app.benchmark.worlds import DATA, WORLDS, world_of
from grail_lightning.core.rollout.batch import SampledBatch
from grail_lightning.core.rollout.grading import align_rows, answer_masks, grade_and_locate, labelled_steps
from tests.benchmark_modules import script

DIGESTS = {
    "sums": "20cded36dc657738",
    "long_sums": "466a4fdcaa8e6710",
    "words": "e2f1aa2cf947fc5b",
    "code": "0391a749ee03b788",
    "search": "1b71c89f5602a474",
    "charts": "488ecf877ce15f64",
}


@pytest.fixture(scope="module")
def program():
    """The program that makes the files of the benchmark."""
    return script("make_benchmark_data")


@pytest.mark.parametrize("name", WORLDS)
def test_rollouts_and_resampled_values_are_those_of_the_published_tables(name):
    arrays = read_arrays(WORLDS[name].file, ("ids", "rewards", "value", "best"))
    told = b"".join(array.tobytes() for array in arrays.values())
    assert hashlib.blake2b(told, digest_size=8).hexdigest() == DIGESTS[name]


def test_the_files_are_small():
    assert sum(file.stat().st_size for file in DATA.glob("*.npz")) < 4e6
    assert {file.stem for file in DATA.glob("*.npz") if not file.stem.endswith("_gain")} == set(WORLDS)


def test_a_world_or_a_number_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"`worlds` must be some of sums, .*, but got 'sum'"):
        world_of("sum")
    with pytest.raises(ValueError, match="`batches` must be at least 1, but got 0"), open_world("sums", 0):
        pass


@pytest.mark.parametrize("name", ["sums", "words", "code", "search", "charts"])
def test_a_batch_is_what_sampling_and_grading_would_give(name, program):
    with open_world(name, 1) as opened, program.open_lab(WORLDS[name]) as lab, torch.no_grad():
        (batch,) = opened.batches
        if WORLDS[name].turns:
            arrays = read_arrays(WORLDS[name].file, ("ids", "turn"), 1)
            rows = zip(arrays["ids"][0].tolist(), arrays["turn"][0].tolist(), strict=True)
            given = [turns_of(ids, turn) for ids, turn in rows]
            expected = lab.play_from(batch.prompts[::GROUP_SIZE], given, 0)
            ours, theirs = (program.without_pictures(opened.policy, b.input_ids) for b in (batch, expected))
            assert torch.equal(ours, theirs)
            for part in ("attention_mask", "response_mask", "turn", "group", "row", "finished"):
                assert torch.equal(getattr(batch, part), getattr(expected, part)), part
            for one, other in zip(batch.episodes, expected.episodes, strict=True):
                assert one.end == other.end
                for turn, again in zip(one.turns, other.turns, strict=True):
                    assert (turn.text, turn.state, turn.score) == (again.text, again.state, again.score)
                    assert [call.result for call in turn.calls] == [call.result for call in again.calls]
        sampled = SampledBatch(**{field.name: getattr(batch, field.name) for field in fields(SampledBatch)})
        graded = grade_and_locate(sampled, lab.verifier, opened.policy.tokenizer)
    assert torch.equal(batch.rewards, graded.rewards)
    assert torch.equal(batch.correct, graded.correct)
    names = ("correct", "status", "layer", "gold", "prediction", *(["outcome"] if name == "code" else []))
    for one, other in zip(batch.verdicts, graded.verdicts, strict=True):
        assert [getattr(one, part) for part in names] == [getattr(other, part) for part in names]
    for part in ("whole", "content", "marker", "after"):
        assert torch.equal(getattr(batch.answer, part), getattr(graded.answer, part))
    assert list(batch.reward_values) == list(graded.reward_values)


@pytest.mark.parametrize("name", ["sums", "words", "code"])
def test_stored_steps_are_those_that_the_task_labels(name):
    with open_world(name, 1) as opened:
        (batch,) = opened.batches
        labels = read_labels(opened)
        for row, aligned in enumerate(align_rows(batch, opened.policy.tokenizer)):
            if name != "code" or row < 24:  # Where each label takes several programs.
                assert labels.steps(row) == labelled_steps(aligned.text, batch.prompts[row])
        assert torch.equal(batch.answer.whole, answer_masks(batch, align_rows(batch, opened.policy.tokenizer)).whole)


def test_the_script_makes_a_file_and_goes_on_with_it(program, tmp_path, monkeypatch):
    file = tmp_path / "sums.npz"
    monkeypatch.setattr(program, "PROMPTS", 2)
    for number in (1, 2):
        arguments = ["sums", f"--file={file}", f"--batches={number}", "--samples=2"]
        monkeypatch.setattr(sys, "argv", ["make_benchmark_data.py", *arguments])
        program.main()
        arrays = dict(np.load(file))
        assert len(arrays["ids"]) == len(arrays["steps"]) == len(arrays["value"]) == number
    assert arrays["ids"].shape == (2, 2 * GROUP_SIZE, 64)
    values = arrays["value"][~np.isnan(arrays["value"])]
    assert set(values.tolist()) <= {0.0, 0.5, 1.0}
    assert {json.loads(text)["status"] for text in arrays["verdicts"]} <= {"right", "wrong", "missing", "unevaluated"}
    right = [json.loads(arrays["verdicts"][index])["status"] == "right" for index in arrays["verdict"][1]]
    assert right == arrays["rewards"][1].astype(bool).tolist()
    assert ((arrays["num_steps"] > 0) & (arrays["num_steps"] < 33)).all()
