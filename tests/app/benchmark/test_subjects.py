"""Subjects are made as `fit` makes credit methods, and one mistake is one line."""

import re
from pathlib import Path

import pytest

from grail_lightning import GroupMean
from grail_lightning.app.benchmark.references import REFERENCES, SCORES, references_in
from grail_lightning.app.benchmark.subjects import is_scorer, subject_of
from grail_lightning.app.benchmark.worlds import WORLDS
from grail_lightning.app.cli.classes import choices
from grail_lightning.credit import GRAIL, PRIME, PermutedRewards, Shuffled

EXAMPLES = Path(__file__).parents[3] / "docs/examples"


def test_a_short_name_with_options_a_control_and_an_estimator():
    subject = subject_of("GRAIL", ["--credit.std=0.3", "--control=Shuffled", "--advantage.share=0.5"])
    assert isinstance(subject.method, GRAIL)
    assert subject.method.std == 0.3
    assert isinstance(subject.control, Shuffled)
    assert isinstance(subject.advantage, GroupMean)
    assert subject.advantage.share == 0.5
    assert subject.options == {"std": 0.3}
    assert subject.given["advantage"] == {"class_path": "GroupMean", "init_args": {"share": 0.5}}
    assert subject.name == "Shuffled(GRAIL, std=0.3) with GroupMean, share=0.5"


def test_a_class_of_a_user_by_its_import_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    subject = subject_of("my_credit.Surprise", ["--credit.top=3.0"])
    assert (subject.method.top, subject.name, subject.reads) == (3.0, "Surprise, top=3.0", ())


def test_a_method_inside_another_one():
    subject = subject_of("PermutedRewards", ["--credit.inner=TreeAdvantage", "--credit.inner.own_row=false"])
    assert isinstance(subject.method, PermutedRewards)
    assert subject.method.inner.own_row is False
    assert subject.name == "PermutedRewards(TreeAdvantage, own_row=False)"


MISTAKES = {
    ("GRAL",): "`credit` must be one of .*, but got 'GRAL'. Did you mean GRAIL?",
    ("no_such_module.Ours",): "No module named 'no_such_module'. Is its folder on PYTHONPATH?",
    ("tests.app.benchmark.methods.Ours",): "has no 'Ours'.",
    ("grail_lightning.GroupMean",): "it is no subclass of TokenCredit",
    ("TokenCredit",): "it is abstract",
    ("GRAIL", "--credit.stt=0.3"): "There is no option `credit.stt`. Did you mean std?",
    ("GRAIL", "--credit.std=wide"): "`credit.std` must be a number, but got 'wide'.",
    ("GRAIL", "--std=0.3"): "must begin with --credit, --control, --advantage, but got '--std=0.3'.",
    ("GRAIL", "--control=Nope"): "`control` must be one of",
    ("TurnRewards", "--advantage=GroupMean"): "`advantage` must be null with `TurnRewards`",
    ("tests.app.benchmark.methods.CannotBeMade",): "constructor raised KeyError",
}


@pytest.mark.parametrize("given", MISTAKES, ids=lambda given: " ".join(given))
def test_a_mistake_is_one_line(given):
    with pytest.raises(ValueError, match=r".") as caught:
        subject_of(given[0], given[1:])
    message = str(caught.value)
    assert "\n" not in message
    assert "model." not in message
    assert re.search(MISTAKES[given].replace("?", r"\?").replace("(", r"\("), message)


def test_every_reference_can_be_made_and_every_method_of_the_package_is_one():
    subjects = {name: reference.subject() for name, reference in REFERENCES.items()}
    assert {name for name, subject in subjects.items() if is_scorer(subject)} == set(SCORES)
    assert all(subject.name == name for name, subject in subjects.items())
    methods = {type(subject.method).__name__ for subject in subjects.values()}
    assert set(choices("model.credit")) <= methods
    assert all(reference.of in (None, *REFERENCES) for reference in REFERENCES.values())
    assert subjects["PRIME"].method.accuracy == (0.01, 0.99)
    assert isinstance(subjects["PRIME"].method, PRIME)


def test_rows_are_listed_where_they_belong():
    names = {world: {reference.name for reference in references_in(WORLDS[world])} for world in WORLDS}
    assert "EGCA" in names["code"] - names["sums"]
    assert "GiGPO" in names["search"] & names["charts"] - names["sums"]
    assert "Resampled" in names["words"] - names["search"]
    assert all("GRAIL" in of_world for of_world in names.values())
