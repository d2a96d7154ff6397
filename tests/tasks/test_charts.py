"""The world of charts: pictures, exact answers, drawings and their scores, and demonstrations with mistakes."""

import io
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import grail_lightning
from grail_lightning.batch import Sampling
from grail_lightning.data import ChartsData
from grail_lightning.engines import HFEngine
from grail_lightning.environments.charts import COLOURS, MAX_DRAWINGS, Chart, Charts, Drawing
from grail_lightning.picture import Picture
from grail_lightning.policy import load_policy
from grail_lightning.step.episodes import play
from grail_lightning.tasks import ChartProblem, ChartSpace, chart_demonstration
from grail_lightning.tasks.charts import label_drawing
from tests.callbacks.scripted import scalars
from tests.shell import main

SPACE = ChartSpace()
PROBLEMS = SPACE.draw(300, "train")
BARS = Chart("bars", ("red", "green", "blue", "yellow"), (3, 7, 7, 8))
LINE = Chart("line", ("red", "green", "blue", "yellow"), (3, 7, 2, 8))


def begun(chart, asks, *about):
    """An environment with a question."""
    environment = Charts()
    environment.reset(**ChartProblem(chart, asks, about).row())
    return environment


def played(**rates):
    rng = random.Random(0)
    return [chart_demonstration(problem, rng, **rates) for problem in PROBLEMS]


def seen(image, colour):
    """The columns and rows of the pixels of a colour."""
    rows, columns = (np.asarray(image) == COLOURS[colour]).all(-1).nonzero()
    return columns, rows


def test_draws_are_reproducible_and_splits_are_disjoint():
    drawn = {split: SPACE.draw(150, split) for split in ("train", "validation", "test")}
    assert drawn["train"] == SPACE.draw(150, "train") == PROBLEMS[:150] != SPACE.draw(150, "train", seed=1)
    assert len(set().union(*drawn.values())) == 450
    assert {(p.chart.form, p.asks) for p in PROBLEMS} == {
        (form, asks) for form in ("bars", "line") for asks in ("largest", "difference", "count", "trend")
    }


def test_answers_are_those_of_the_values_that_the_pixels_show():
    for problem in PROBLEMS:
        row = problem.row()
        image = Image.open(io.BytesIO(row["image"])).convert("RGB")
        values, places = {}, {}
        for colour in row["colours"]:
            columns, rows = seen(image, colour)
            # A bar ends at the value; the square of a point has it in its middle.
            values[colour] = (80 - (rows.min() if row["form"] == "bars" else (rows.min() + rows.max() + 1) / 2)) / 8
            places[colour] = columns.mean()
        ordered = [values[colour] for colour in sorted(places, key=places.get)]
        words = row["problem"].strip("?").split()
        if words[0] == "Which":
            expected = max(values, key=values.get)
        elif words[0] == "Does":
            expected = "rise" if ordered[-1] > ordered[0] else "fall"
        elif words[1] == "far":
            expected = f"{abs(values[words[4]] - values[words[6]]):g}"
        else:
            expected = str(sum(value > int(words[-1]) for value in values.values()))
        assert row["answer"] == expected


def test_a_worked_solution_is_right_and_every_drawing_of_it_scores_and_is_shown():
    for problem, turns in zip(PROBLEMS, played(), strict=True):
        environment = Charts()
        environment.reset(**problem.row())
        before = problem.chart.picture()
        for said, told in turns[:-1]:
            tool, text = said.strip("<>").split("</")[0].split(">")
            assert getattr(environment, tool)(text) == told
            assert environment.score_turn() == 1.0
            assert (np.asarray(told) != np.asarray(before)).any()
            before = told
        assert turns[-1] == (f"Answer: {problem.answer}", None)
        assert len(turns) == problem.row()["steps"] + 1


@pytest.mark.parametrize(
    ("chart", "question", "scores"),
    [
        # In any order, each once, corners either way, up to half a unit beside.
        (BARS, ("difference", "red", "yellow"), {"box 6 0 8 8": 1, "box 8 8 6 0": 0, "box 2.2 3.5 -0 0.4": 1}),
        (BARS, ("difference", "red", "yellow"), {"box 0 0 2 4": 0, "box 2 0 4 7": 0, "point 1 3": 0}),
        (
            LINE,
            ("difference", "red", "yellow"),
            {"point 7 8": 1, "point 1.6 3": 0, "point 1.5 2.5": 1, "box 0 0 2 3": 0},
        ),
        (BARS, ("largest",), {"line 10 8 0 8": 1, "box 2 0 4 7": 0, "box 6 0 8 8": 1}),
        (BARS, ("count", "7"), {"line 0 7 10 7": 1, "box 2 0 4 7": 0, "box 6 0 8 8": 1, "line 0 7 10 6": 0}),
        (LINE, ("trend",), {"line 5 2 7 8": 0, "line 7 8 1 3": 1, "line 1 3 7 8": 0}),
    ],
)
def test_a_drawing_scores_if_it_marks_what_the_question_needs(chart, question, scores):
    environment = begun(chart, *question)
    assert environment.score_turn() is None
    for drawn, score in scores.items():
        tool, _, text = drawn.partition(" ")
        assert isinstance(getattr(environment, tool)(text), Image.Image)
        assert environment.score_turn() == score, drawn
    assert environment.score_turn() is None


@pytest.mark.parametrize(
    "text",
    ["", "nan nan", "NaN, 3", "inf 1", "1e999 2", "9" * 400 + " 1", "-1 2", "3 10.5", "1 2 3", "1 " * 10_000, "x\x00"],
)
def test_a_drawing_that_is_no_place_on_the_picture_is_an_observation_and_scores_0(text):
    environment = begun(LINE, "trend")
    assert environment.point(text).startswith("Not drawn: it needs 2 numbers, each from 0 to 10")
    assert environment.line(text).startswith("Not drawn: it needs 4 numbers")
    assert environment.score_turn() == 0.0
    assert environment.line("1 3 7 8") == LINE.picture([LINE.slope(0, 3)])


def test_ten_thousand_drawings_are_capped():
    environment = begun(LINE, "trend")
    told = [environment.point(f"{k % 10} {k % 7}") for k in range(10_000)]
    assert sum(isinstance(one, Image.Image) for one in told) == MAX_DRAWINGS
    assert told[-1] == "Not drawn: 16 drawings are there, and no more fit."


def test_the_state_is_the_question_and_the_set_of_drawings():
    one, other = begun(LINE, "trend"), begun(LINE, "trend")
    for environment, drawn in ((one, ("1 2", "3 4")), (other, ("3 4", "1 2"))):
        assert environment.state_key() == begun(LINE, "trend").state_key() != begun(BARS, "trend").state_key()
        for text in drawn:
            environment.point(text)
    assert one.state_key() == other.state_key() != begun(LINE, "trend").state_key()


@pytest.mark.parametrize(
    ("asks", "about", "drawing", "kind"),
    [
        ("largest", (), Drawing("box", (6, 0, 8, 8)), "sound"),
        ("count", ("7",), Drawing("box", (2, 0, 4, 7)), "misconception"),  # At the level, not above.
        ("count", ("7",), Drawing("box", (0, 0, 2, 3)), "slip"),
        ("trend", (), Drawing("line", (5, 7, 7, 8)), "misconception"),  # The last two, not the first and the last.
        ("difference", ("red", "yellow"), Drawing("box", (2, 0, 4, 7)), "misconception"),  # The neighbour.
        ("difference", ("red", "yellow"), Drawing("box", (6, 0, 8, 7)), "slip"),
    ],
)
def test_a_drawing_has_the_label_of_its_mistake(asks, about, drawing, kind):
    assert label_drawing(ChartProblem(BARS, asks, about), drawing) == kind


def test_labels_of_demonstrations_are_those_of_the_mistakes_that_were_made():
    kinds, right = {name: Counter() for name in ("slip", "misconception")}, Counter()
    for name, labels in kinds.items():
        for problem, turns in zip(PROBLEMS, played(**{name: 0.5}), strict=True):
            right[name] += turns[-1][0] == f"Answer: {problem.answer}"
            for said, _ in turns[:-1]:
                tool, text = said.strip("<>").split("</")[0].split(">")
                labels[label_drawing(problem, Drawing(tool, tuple(map(float, text.split()))))] += 1
    assert right["slip"] < 150
    assert 100 < right["misconception"] < 250  # Some mistakes give the right answer by chance.
    assert kinds["misconception"]["slip"] == 0
    assert kinds["misconception"]["misconception"] > 80
    # A slip may hit what a misconception would mark.
    assert kinds["slip"]["slip"] > 3 * kinds["slip"]["misconception"]


@pytest.mark.slow
def test_the_packaged_policy_is_small_sees_and_is_right_on_30_to_60_percent_of_its_rollouts():
    folder = Path(grail_lightning.__file__).parent / "assets" / "charts"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 6 * 10**6
    policy, engine = load_policy("charts").eval(), HFEngine()
    assert 1e6 <= policy.model.num_parameters() <= 3e6
    engine.update_weights(policy)
    (asked,) = ChartsData(num_val=300, seed=1).load("val")
    prompts = list(asked.prompts)
    white = {"type": "image", "image": Picture(Image.new("RGB", (80, 80), "white"))}
    blind = [
        replace(p, messages=[{"role": "user", "content": [white, p.messages[0]["content"][1]]}]) for p in prompts[:150]
    ]
    right = []
    for shown in (prompts, blind):
        batch = play(engine, policy, shown, 1, Sampling(max_response_length=48), range(len(shown)))
        right.append(np.mean([p.task.answer(t) == p.reference for t, p in zip(batch.texts, shown, strict=True)]))
        if shown is prompts:
            calls = [call for episode in batch.episodes for call in episode.calls]
            assert sum(len(call.pictures) == 1 for call in calls) > 0.98 * len(calls)
            assert sum(episode.end == "answered" for episode in batch.episodes) > 285
    # The standard error of 300 samples is 3 points, that of 150 is 4.
    assert right[1] + 0.15 < right[0]
    assert 0.3 <= right[0] <= 0.6


def test_the_quickstart_makes_a_step_that_gives_drawings_of_one_rollout_different_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--data.num_train=64", "--data.num_val=4", "--data.prompts_per_batch=8", "--trainer.limit_val_batches=0"]
    main(["fit", "--config=configs/quickstart_charts.yaml", "--trainer.max_steps=1", *sizes])
    found = scalars(Path("runs/quickstart_charts"))
    assert 0.2 < found["train/episodes/turn_score"][0][1] < 0.95
    assert found["credit/span_tokens"][0][1] > 0.5
    assert found["credit/weight_std"][0][1] > 0.1
