"""What a method reads is recorded, and labels are out of its reach: methods that try."""

import os
import sys
from dataclasses import replace

import pytest

from grail_lightning.app.benchmark.labels import read_labels
from grail_lightning.app.benchmark.reads import recording
from grail_lightning.app.benchmark.rollouts import open_world
from grail_lightning.app.benchmark.stored import read_arrays
from grail_lightning.app.benchmark.subjects import Subject, subject_of
from grail_lightning.app.benchmark.weights import weigh
from grail_lightning.app.benchmark.worlds import WORLDS
from grail_lightning.credit import GiGPO, Resampled, TreeAdvantage
from tests.app.benchmark import methods

FILE = str(WORLDS["sums"].file)


@pytest.fixture(scope="module")
def sums():
    with open_world("sums", 1) as opened:
        yield opened


@pytest.fixture(scope="module")
def search():
    with open_world("search", 1) as opened:
        yield opened


def weighed(method, opened):
    return weigh(Subject(name="ours", method=method), opened)


@pytest.mark.parametrize("method", [methods.AsksTask, methods.AsksNewTask, methods.AsksChain, methods.ChecksPrompts])
def test_a_method_that_asks_a_task_for_labels_is_an_oracle(sums, method):
    found = weighed(method(), sums)
    assert found.oracle
    assert "labels" in found.reads


def test_a_method_that_reads_neither_is_none(sums):
    for method in (methods.Constant(), TreeAdvantage()):
        found = weighed(method, sums)
        assert (found.reads, found.oracle) == ((), False)


@pytest.mark.parametrize("how", ["numpy", "open", "descriptor", "fork"])
def test_the_file_of_the_labels_cannot_be_opened_and_who_tries_is_an_oracle(sums, how):
    found = weighed(methods.OpensFile(FILE, how), sums)
    assert methods.OpensFile.stolen is None
    assert found.reads == ("files of the benchmark",)
    assert found.oracle


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_another_name_of_the_file_does_not_help(sums, link, tmp_path):
    link(FILE, tmp_path / "data.npz")
    found = weighed(methods.OpensFile(str(tmp_path / "data.npz")), sums)
    assert methods.OpensFile.stolen is None
    assert found.oracle


def test_the_benchmarks_own_reader_gives_a_method_nothing(sums):
    found = weighed(methods.CallsReader(), sums)
    assert methods.CallsReader.stolen is None
    assert found.oracle
    assert "steps" in read_arrays(WORLDS["sums"].file, ["steps"], 1)  # As before, when no method runs.


def test_labels_are_no_objects_while_a_method_runs(sums):
    weighed(methods.Searches(), sums)
    assert methods.Searches.stolen == []
    labels = read_labels(sums)
    with pytest.raises(RuntimeError, match="Labels must not be read before the weights"):
        weighed(methods.Constant(), sums)
    del labels
    weighed(methods.Constant(), sums)


def test_weights_that_a_method_keeps_and_changes_later_stay_as_they_were(sums):
    class Keeps(methods.Constant):
        def __call__(self, policy, batch, context):
            Keeps.kept = methods.ones(batch)
            return Keeps.kept

    found = weighed(Keeps(), sums)
    Keeps.kept.values.zero_()
    assert found.batches[0].weights.values.any()
    assert found.batches[0].advantages.any()


def test_scores_of_turns_are_recorded_however_they_are_read(search):
    found = weighed(methods.ReadsScores(), search)
    assert set(methods.ReadsScores.stolen) == {0.0, 1.0, None}
    assert (found.reads, found.oracle) == (("environment scores",), True)
    assert weighed(GiGPO(scores=True), search).oracle
    assert not weighed(GiGPO(), search).reads


@pytest.mark.parametrize("how", ["reference", "verdict", "column", "columns"])
def test_reading_the_reference_answer_is_recorded_and_makes_no_oracle(sums, how):
    found = weighed(methods.ReadsReference(how), sums)
    assert (found.reads, found.oracle) == (("reference answers",), False)


def test_the_runs_own_grading_of_continuations_is_not_reading(sums):
    found = weighed(Resampled(2, search="bisection"), sums)
    assert found.reads == ()


def test_what_a_class_reads_when_it_is_imported_or_made_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "early_reader.py").write_text(
        "from grail_lightning.app.benchmark.stored import read_arrays\n"
        "from grail_lightning.app.benchmark.worlds import WORLDS\n"
        "from grail_lightning.credit import TokenCredit\n"
        "try:\n    LABELS = read_arrays(WORLDS['sums'].file, ['steps'])\n"
        "except PermissionError:\n    LABELS = None\n"
        "class Early(TokenCredit):\n"
        "    def __call__(self, policy, batch, context):\n        raise NotImplementedError\n"
    )
    subject = subject_of("early_reader.Early")
    assert sys.modules["early_reader"].LABELS is None
    assert "files of the benchmark" in subject.reads


def test_a_copy_of_a_prompt_is_no_reading(sums):
    with recording() as seen:
        copied = replace(sums.batches[0].prompts[0], messages="another")
    assert seen == []
    with recording() as seen:
        assert copied.reference == sums.batches[0].prompts[0].reference
    assert seen == ["reference answers"]
