"""Kept samples are graded again without sampling, by the command and through its functions."""

import re
from pathlib import Path

import pytest

from grail_lightning import (
    DatasetSpec,
    EnvironmentTask,
    Evaluation,
    MathData,
    MathTask,
    Sampling,
    read_evaluation,
    read_samples,
)
from grail_lightning.answers import Boxed, Verdict, Verifier
from grail_lightning.app.callbacks.samples import _grading
from grail_lightning.app.regrade import main, regraded
from grail_lightning.app.results.records import FORMAT, append_samples, write_evaluation
from grail_lightning.worlds.sums.calculator import Calculator
from tests.app.results.made import sample
from tests.core.data.recorder import write
from tests.runs import module, trainer
from tests.shell import refusal


def _written(folder, samples, facts):
    folder.mkdir(exist_ok=True)
    write_evaluation(folder, facts)
    append_samples(folder, 0, samples)
    return folder


def _facts(**grading):
    """What a test of a user's task leaves, with one sample a problem."""
    return {
        **{"format": FORMAT, "finished": "now", "num_samples": 1, "table": {"pass_at": [1]}},
        "datasets": {"d": {"problems": 3, "digest": "", "source": None, "first": 2}},
        "grading": {"d": {"task": "x.Y", "compare": "math"} | grading},
    }


SAMPLES = Path("test/samples")
BOXED = {"class": "grail_lightning.answers.find.Boxed"}


def test_the_table_of_regraded_samples_is_that_of_the_test(undisturbed, capsys):
    folder, _, table = undisturbed
    main([str(folder)])
    said = capsys.readouterr().out
    assert said.startswith(f"12 samples of {folder / 'test' / 'samples'}, 0 with another verdict\n")
    assert said.endswith(f"\n\n{table}\n")


def test_changed_verdicts_are_named_and_written_beside_the_old_ones(undisturbed, capsys, tmp_path):
    tested, _, table = undisturbed
    samples = list(read_samples(tested / SAMPLES))
    right = next(k for k, sample in enumerate(samples) if sample["correct"])
    samples[right] |= {"correct": False, "status": "timeout", "layer": "none"}
    folder = _written(tmp_path / "samples", samples, read_evaluation(tested / SAMPLES))
    main([str(folder), "--output", str(tmp_path / "new")])
    said = capsys.readouterr().out
    assert "1 with another verdict" in said
    index, number = samples[right]["index"], samples[right]["sample"]
    assert f"problem {index} sample {number}: timeout (none) -> right (" in said
    assert table in said
    assert [s["status"] for s in read_samples(folder)].count("timeout") == 1
    assert [s["status"] for s in read_samples(tmp_path / "new")].count("timeout") == 0
    assert "must be a new folder" in refusal(capsys, main, folder, "--output", tmp_path / "new")


@pytest.mark.parametrize("form", [BOXED, {"class": "grail_lightning.answers.find.boxes.Boxed"}])  # an older version's
def test_answers_are_read_again_in_a_form_of_this_package_and_kept_otherwise(form):
    samples = [sample(reference="2", response=text, prediction=text[-1]) for text in (r"\boxed{2} 3", "no box 2")]
    with Verifier() as verifier:
        ours = regraded(samples, _facts(answer=form), verifier)
        theirs = regraded(samples, _facts(answer={"class": "mine.Form"}), verifier)
    assert [(s["prediction"], s["status"]) for s in ours] == [("2", "right"), (None, "missing")]
    assert [(s["prediction"], s["status"]) for s in theirs] == [("3", "wrong"), ("2", "right")]


def test_answers_are_compared_as_the_task_compares_them():
    paris = [sample(reference="Paris", response=r"\boxed{paris}")]
    for compare, status in (("text", "right"), ("exact", "wrong"), ("math", "right")):
        with Verifier() as verifier:
            (found,) = regraded(paris, _facts(answer=BOXED, compare=compare), verifier)
        assert found["status"] == status, compare


def test_an_answer_that_is_not_worked_out_is_told_from_the_facts_of_the_test():
    samples = [sample(reference="12", response=rf"\boxed{{{text}}}") for text in ("12", "7+5")]
    for form, statuses in ((Boxed(), ["right", "right"]), (Boxed(evaluated=True), ["right", "unevaluated"])):
        facts = _grading(MathTask(answer=form))
        assert facts["answer"] == BOXED | ({"evaluated": True} if form.evaluated else {})  # as before, where it is off
        with Verifier() as verifier:
            assert [s["status"] for s in regraded(samples, _facts(**facts), verifier)] == statuses


def test_a_rollout_with_tokens_that_its_text_lacks_stays_wrong():
    told = sample(reference="2", response=r"\boxed{2}", prediction="2", status="unknown_tokens")
    with Verifier() as verifier:
        assert regraded([told], _facts(answer=BOXED), verifier) == [told]


def test_what_no_comparison_has_judged_stays_as_it_was():
    """An environment's verdicts, and rollouts whose last turn calls a tool, in whose text a number is no answer."""
    episode = {"end": "turns", "transcript": "…", "num_turns": 1}
    samples = [
        sample(reference="", response="", prediction="0.5", status="right", correct=True, layer="none", **episode),
        sample(reference="2", response="add(2)", prediction=None, status="missing", correct=False, **episode),
        sample(reference="2", response="so 2", prediction="3", status="wrong", correct=False, **episode),
    ]
    with Verifier() as verifier:
        found = regraded(samples, _facts(answer={"class": "grail_lightning.answers.find.LastNumber"}), verifier)
    assert found[:2] == samples[:2]
    assert (found[2]["status"], found[2]["prediction"]) == ("right", "2")


class Judging(MathTask):
    def verdict(self, prompt):
        return Verdict.missing(prompt.reference)


class Reading(MathTask):
    def answer(self, text):
        return "7"


class Comparing(MathTask):
    @staticmethod
    def make_verifier():
        return Verifier()


def test_a_task_that_judges_reads_or_compares_itself_is_known_from_its_facts():
    assert _grading(MathTask()).keys() == {"task", "compare", "answer"}
    assert _grading(EnvironmentTask(environment=Calculator)).keys() == {"task", "compare", "answer", "environment"}
    assert _grading(Judging())["own_verdicts"]
    assert "answer" not in _grading(Reading())
    with Verifier() as verifier, pytest.raises(ValueError, match=r"those of d were compared by .*Comparing.make_verif"):
        regraded([sample()], _facts(**_grading(Comparing())), verifier)


def test_text_of_a_model_cannot_steer_the_terminal(tmp_path, capsys):
    hostile = "\x1b]0;owned\x07\u202e" + "9" * 5000
    _written(tmp_path, [sample(reference="2", response="\\boxed{" + hostile + "}\ud800")], _facts(answer=BOXED))
    main([str(tmp_path)])
    said = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(said)
    assert "wrong (none) -> " in said
    assert "d (first 2)" in said


def test_an_interrupted_test_is_regraded_as_far_as_it_went(undisturbed, tmp_path, capsys):
    samples = undisturbed[0] / SAMPLES
    write_evaluation(tmp_path, read_evaluation(samples) | {"finished": None})
    lines = (samples / "rank_00000.jsonl").read_bytes()
    (tmp_path / "rank_00000.jsonl").write_bytes(lines[: len(lines) // 2])
    main([str(tmp_path)])
    assert "The evaluation was interrupted: 1 of 4 problems." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"format": 2}', "other entries"),
        ('{"format": 1, "datasets": {}, "num_samples": 1}', "the format 1 of another version"),
    ],
)
def test_a_folder_that_no_test_or_one_of_an_earlier_version_left_is_refused(content, got, empty_folder, capsys):
    Path("evaluation.json").write_text(content)
    said = refusal(capsys, main, ".")
    assert re.search(rf"must be a folder of samples with an evaluation.json of the `format` 2, but got {got}", said)


def test_parts_by_column_rows_that_were_left_out_and_repeated_problems_are_told(tmp_path, capsys):
    rows = [
        {"problem": f"{k % 3}+1?", "answer": str(k % 3 + 1), "level": 1 + k % 2, "more": "x" * 300} for k in range(6)
    ]
    rows = [row | {"kind": "A/B" if row["level"] == 1 else "A_B"} for row in rows]
    data = MathData(test=DatasetSpec(write(tmp_path, rows), name="sums", limit=4))
    run = trainer(-1, Evaluation(num_samples=2, by=("level", "kind", "subject")), default_root_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="^1 of the 4 problems of sums repeat an earlier one."):
        (figures,) = run.test(module(sampling=Sampling(max_response_length=8)), data, verbose=False)
    said = capsys.readouterr().out
    assert "sums (first 4)  " in said
    assert "sums (first 4), level 1" in said
    assert "\n\nNo problem has a text or number 'subject'.\n" in said
    assert {name for name in figures if "level" in name} == {
        f"test/sums/level_{level}/{name}" for level in (1, 2) for name in ("accuracy", "pass_at_1")
    }
    kinds = sorted({name.split("/")[2] for name in figures if "kind" in name})
    assert kinds == ["kind_A_B", "kind_A_B_"], "one name for two values would lose the figures of one"
    folder = tmp_path / "test" / "samples"
    assert read_evaluation(folder)["datasets"]["sums"]["first"] == 4
    samples = list(read_samples(folder))
    assert [s["columns"] for s in samples[:2]] == [{"level": 1, "kind": "A/B"}] * 2, "long cells are not kept"
    assert [s["seed"] for s in samples if s["index"] == 3] == [s["seed"] for s in samples if s["index"] == 0]
    main([str(folder)])
    assert said.strip() in capsys.readouterr().out
