"""The world of charts: pictures, exact answers, drawings and their scores, and demonstrations with mistakes."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from grail_lightning.worlds.charts.environment import COLOURS, MAX_DRAWINGS, Chart, Charts, Drawing
from grail_lightning.worlds.charts.task import ChartProblem, ChartSpace, label_drawing
from tests.app.callbacks.scripted import scalars
from tests.shell import main

PROBLEMS = ChartSpace().draw(300, "train")
BARS = Chart("bars", ("red", "green", "blue", "yellow"), (3, 7, 7, 8))
LINE = Chart("line", ("red", "green", "blue", "yellow"), (3, 7, 2, 8))


def begun(chart, asks, *about):
    """An environment with a question."""
    environment = Charts()
    environment.reset(**ChartProblem(chart, asks, about).row())
    return environment


def test_answers_are_those_of_the_values_that_the_pixels_show():
    for problem in PROBLEMS:
        row = problem.row()
        image = Image.open(io.BytesIO(row["image"])).convert("RGB")
        values, places = {}, {}
        for colour in row["colours"]:
            rows, columns = (np.asarray(image) == COLOURS[colour]).all(-1).nonzero()
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


@pytest.mark.parametrize(
    ("chart", "question", "scores"),
    [
        # In any order, each once, corners either way, up to half a unit beside.
        (BARS, ("difference", "red", "yellow"), {"box 6 0 8 8": 1, "box 8 8 6 0": 0, "box 2.2 3.5 -0 0.4": 1}),
        (BARS, ("difference", "red", "yellow"), {"box 0 0 2 4": 0, "box 2 0 4 7": 0, "point 1 3": 0}),
        (LINE, ("difference", "red", "yellow"), {"point 7 8": 1, "point 1.6 3": 0, "point 1.5 2.5": 1}),
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
    "text", ["", "nan nan", "inf 1", "1e999 2", "9" * 400 + " 1", "-1 2", "3 10.5", "1 2 3", "1 " * 10_000, "x\x00"]
)
def test_a_drawing_that_is_no_place_on_the_picture_is_an_observation_and_scores_0(text):
    environment = begun(LINE, "trend")
    assert environment.point(text).startswith("Not drawn: it needs 2 numbers, each from 0 to 10")
    assert environment.line(text).startswith("Not drawn: it needs 4 numbers")
    assert environment.score_turn() == 0.0
    assert environment.line("1 3 7 8") == LINE.picture([LINE.slope(0, 3)])


def test_the_number_of_drawings_is_capped():
    environment = begun(LINE, "trend")
    told = [environment.point(f"{k % 10} {k % 7}") for k in range(100)]
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


def test_the_quickstart_makes_a_step_that_gives_drawings_of_one_rollout_different_weights(empty_folder):
    sizes = ["--data.num_train=8", "--data.num_val=4", "--data.prompts_per_batch=2", "--trainer.limit_val_batches=0"]
    main(["fit", "--config=configs/quickstart_charts.yaml", "--trainer.max_steps=1", *sizes])
    found = scalars(Path("runs/quickstart_charts"))
    assert 0.2 < found["train/episodes/turn_score"][0][1] < 0.95
    assert found["credit/span_tokens"][0][1] > 0.5
    assert found["credit/weight_std"][0][1] > 0.1
