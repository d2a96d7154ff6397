"""One line for each change, with the time that is left."""

import re

import pytest

from grail_lightning.sweep.grid import read_study
from grail_lightning.sweep.progress import Progress, duration
from grail_lightning.sweep.records import Record
from tests.sweep.studies import write_study


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (3540, "59 min"), (3599, "1 h 00 min"), (11_100, "3 h 05 min")],
)
def test_a_duration_in_words(seconds, words):
    assert duration(seconds) == words


@pytest.fixture
def runs(tmp_path):
    """Two runs of GRPO and two of GRAIL."""
    return read_study(write_study(tmp_path, seeds=[0, 1])).runs


def test_the_time_left_is_that_of_like_runs_over_the_places(runs):
    lines = []
    progress = Progress(2, lines.append)
    assert progress.left([("new", "t")], []) is None, "nothing is known yet"
    finished = [(runs[0], Record(state="finished", seconds=100)), (runs[2], Record(state="finished", seconds=140))]
    progress.begin([*finished, (runs[1], Record(state="finished", seconds=300))], 5)
    grpo, grail = runs[0].group, runs[1].group
    assert progress.left([grpo, grail], []) == (120 + 300) / 2
    assert progress.left([("new", "t")], []) == 180 / 2, "the mean of all, for a method that has not been seen"
    assert progress.left([grpo], [(grail, 100.0), (grpo, 500.0)]) == max((120 + 200 + 0) / 2, 200)


def test_each_change_is_a_line(runs):
    lines = []
    progress = Progress(1, lines.append)
    progress.begin([], 3)
    progress.started(runs[0], Record(attempts=1))
    progress.ended(runs[0], Record(state="finished", seconds=46, outcome="0.4 -> 0.9 (8 problems)"), 4000.0)
    progress.started(runs[1], Record(attempts=2))
    progress.ended(runs[1], Record(state="failed", error="ValueError: no"), None)
    progress.ended(runs[2], Record(state="interrupted"), None)
    progress.elsewhere(runs[3], Record(state="finished"))
    assert [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in lines] == [
        "[0/3] GRPO, sums, seed 0: started",
        "[1/3] GRPO, sums, seed 0: finished in 46 s, held-out accuracy 0.4 -> 0.9 (8 problems); about 1 h 07 min left",
        "[1/3] GRAIL, sums, seed 0: started, attempt 2",
        f"[2/3] GRAIL, sums, seed 0: failed, see {runs[1].folder / 'fit.log'}",
        "[2/3] GRPO, sums, seed 1: interrupted",
        "[3/3] GRAIL, sums, seed 1: finished in another call",
    ]
