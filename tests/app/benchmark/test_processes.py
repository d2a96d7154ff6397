"""Jobs in processes of their own: order, files, progress, mistakes and Ctrl-C."""

import os
import signal
import time
from pathlib import Path

import pytest

from grail_lightning.app.benchmark.processes import Job, run_jobs


class Bar:
    """Adds up what it is told."""

    def __init__(self):
        self.total = 0.0

    def update(self, n):
        self.total += n

    def set_postfix_str(self, s, refresh):
        self.words = s


def squared(number, folder, report):
    """Marks that it ran, and tells that it is half done."""
    (Path(folder) / f"ran_{number}_{time.monotonic_ns()}").touch()
    report(0.5)
    return {"square": number**2, "process": os.getpid()}


def wrong(report):
    raise ValueError("`top` must be at least 1, but got 0.")


def broken(report):
    raise KeyError("no such key")


def killed(report):
    os.kill(os.getpid(), signal.SIGKILL)


def job(measure, place, name="job", **arguments):
    return Job(name=name, measure=measure, arguments=arguments, units=2.0, file=place / f"{name}.json")


def test_outcomes_come_in_order_are_kept_and_are_not_measured_again(tmp_path):
    jobs = [job(squared, tmp_path, f"job{k}", number=k, folder=str(tmp_path)) for k in range(4)]
    bar = Bar()
    outcomes = run_jobs(jobs, 2, bar, reuse=True)
    assert [outcome["square"] for outcome in outcomes] == [0, 1, 4, 9]
    assert 1 <= len({outcome["process"] for outcome in outcomes}) <= 2  # A process takes one job after another.
    assert os.getpid() not in {outcome["process"] for outcome in outcomes}
    assert bar.total == pytest.approx(8.0)
    jobs[2].file.unlink()
    again = Bar()
    assert [outcome["square"] for outcome in run_jobs(jobs, 2, again)] == [0, 1, 4, 9]
    assert again.total == pytest.approx(8.0)
    assert len([*tmp_path.glob("ran_2_*")]) == 2
    assert len([*tmp_path.glob("ran_1_*")]) == 1


def test_each_job_has_a_process_of_its_own(tmp_path):
    jobs = [job(squared, tmp_path, f"job{k}", number=k, folder=str(tmp_path)) for k in range(2)]
    assert len({outcome["process"] for outcome in run_jobs(jobs, 1, Bar())}) == 2


def test_a_mistake_is_a_value_error_with_the_name_of_the_job_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"^bad: `top` must be at least 1, but got 0\.$"):
        run_jobs([job(wrong, tmp_path, "bad")], 1, Bar())
    assert not (tmp_path / "bad.json").exists()


def test_another_error_shows_its_traceback(tmp_path, capfd):
    with pytest.raises(ValueError, match="bad: KeyError: 'no such key'"):
        run_jobs([job(broken, tmp_path, "bad")], 1, Bar())
    assert "in broken" in capfd.readouterr().err


def test_a_killed_process_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone: the process was killed, most likely for lack of memory\."):
        run_jobs([job(killed, tmp_path, "gone")], 1, Bar())
