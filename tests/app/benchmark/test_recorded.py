"""The recorded training runs of the package: those of the studies, with the options of today."""

import json
from pathlib import Path

import pytest

from grail_lightning.app.benchmark.recorded import FILE, largest_chance, recorded, settings_of
from grail_lightning.app.benchmark.training import ARMS, SETTINGS, Request, content_of, estimate, train
from grail_lightning.app.sweep import runs_of
from tests.benchmark_modules import script

ROOT = Path(__file__).parents[3]
RECORDED = [world for world in SETTINGS if recorded(world)]


def test_the_file_is_what_the_script_makes_of_the_tables(monkeypatch):
    monkeypatch.chdir(ROOT)
    program = script("make_training_data")
    parser = program.FitOptions()
    made = program.as_json({name: world for name in SETTINGS if (world := program.world_of(name, parser))})
    assert made == FILE.read_text(), "run python scripts/make_training_data.py"
    assert FILE.stat().st_size < 100_000
    assert [*json.loads(made)["worlds"]] == RECORDED == ["sums", "words", "code", "search", "charts"]


@pytest.mark.parametrize("world", RECORDED)
def test_every_run_of_both_arms_is_recorded(world, tmp_path):
    runs = runs_of(content_of(world, ARMS, 6, str(tmp_path)))
    rates = {run.point["model.optimizer.lr"] for run in runs}
    assert len(rates) == 3
    known = recorded(world)
    at_rates = [[known.row_of(run) for run in runs if (run.method, run.point["model.optimizer.lr"]) == (arm, rate)]
                for arm in ARMS for rate in rates]  # fmt: skip
    assert sorted(sum(row is not None for row in rows) for rows in at_rates) == [0, 0, 0, 0, 6, 6]
    request = Request(method="Uniform", worlds=[world], folder=tmp_path, jobs=1)
    assert estimate(request) == pytest.approx(
        (3 * len(content_of(world, ARMS, 1, "a")["choose"]["seeds"]) + 6) * SETTINGS[world].seconds
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("world", "method", "end", "over_training"),
    [
        ("sums", "GRAIL", (-2.5, 2.3), (-1.8, 1.0)),
        ("words", "GRAIL", (1.7, 2.7), (-0.2, 1.6)),
        ("code", "TreeAdvantage", (0.1, 1.3), (0.7, 0.6)),
        ("search", "GRAIL", (-1.7, 3.2), (-3.5, 1.7)),
        ("charts", "GRAIL", (-1.7, 1.9), (-2.4, 1.3)),
    ],
)
def test_recorded_methods_have_the_figures_of_the_studies(world, method, end, over_training, tmp_path):
    """Points over Dr. GRPO with half-widths, as `scripts/study_tables.py` prints them of the tables in docs/results."""
    request = Request(method=method, worlds=[world], folder=tmp_path, arms="all")
    assert estimate(request) == 0
    trained = train(request, say=lambda line: None)
    assert trained.reasons == {}
    figures = trained.figures[world]
    for (estimated, low, high), (value, half) in ((figures["end"], end), (figures["over_training"], over_training)):
        assert estimated == pytest.approx(value, abs=0.051)
        assert (high - low) / 2 == pytest.approx(half, abs=0.051)
    assert figures["seeds"] == [0, 1, 2, 3, 4, 5]
    assert figures["recorded"]["arms"] == ["method", "uniform", "baseline"]
    # Nothing was run: the folder of the runs is empty.
    assert not [*tmp_path.rglob("sweep.json")]


def test_the_settings_are_those_of_the_run_without_its_arm():
    resolved = {
        "model": {"credit": {"class_path": "a"}, "policy": "p", "optimizer": {"init_args": {"lr": 1, "eps": 2}}}
    }
    resolved |= {"trainer": {"max_steps": 3, "devices": 1}, "data": {"class_path": "d", "unset": None}}
    assert settings_of(resolved) == {
        "model.policy": "p",
        "model.optimizer.init_args.eps": 2,
        "trainer.max_steps": 3,
        "data.class_path": "d",
    }
    known = recorded("sums")
    assert known.other_settings({}) == {name: (value, None) for name, value in known.settings.items()}


def test_starts_may_differ_by_chance_alone():
    # Four standard errors of a difference of two shares of 512 problems with 2 seeds each, at most 0.5 · √(2 / 1024).
    assert largest_chance(512, 2) == pytest.approx(4 * 0.5 * (2 / 1024) ** 0.5)
