"""How many runs a machine takes at once."""

import os
import sys

import pytest
import torch

from grail_lightning.sweep import machine
from grail_lightning.sweep.grid import read_study
from grail_lightning.sweep.machine import PROCESS_BYTES, available_bytes, cores, shared_out, slots
from grail_lightning.sweep.plan import RunPlanner
from tests.sweep.studies import write_study


@pytest.fixture
def plans(tmp_path):
    """The runs of a small sweep on CPUs."""
    study = read_study(write_study(tmp_path))
    return RunPlanner(study).plan(study.runs)


@pytest.mark.parametrize(
    ("gpus", "devices", "jobs", "expected"),
    [
        (["0", "1", "2", "3"], 1, None, ["0", "1", "2", "3"]),
        (["4", "5", "6", "7"], 2, None, ["4,5", "6,7"]),
        (["0", "1", "2"], 2, None, ["0,1"]),
        (["GPU-a", "GPU-b", "GPU-c"], 1, 2, ["GPU-a", "GPU-b"]),
    ],
)
def test_each_run_has_gpus_of_its_own(gpus, devices, jobs, expected):
    assert shared_out(gpus, devices, jobs) == expected


@pytest.mark.parametrize(("devices", "jobs"), [(1, 3), (2, 2), (4, None)])
def test_more_gpus_than_there_are_cannot_be_asked_for(devices, jobs):
    with pytest.raises(ValueError, match=rf"`--jobs` must leave {devices} GPU\(s\) to each run, .* 2 can be seen"):
        shared_out(["0", "1"], devices, jobs)


def test_cores_are_shared_out_as_threads(plans, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = slots(plans, None)
    assert 1 <= len(found.environments) <= cores()
    assert all(place == {"OMP_NUM_THREADS": "1"} for place in found.environments) or "GiB of memory" in found.reason
    one = slots(plans, 1)
    assert one.environments == ({"OMP_NUM_THREADS": str(cores())},)
    assert one.reason == "--jobs"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert slots(plans, 2).environments == ({}, {}), "the user's own number stays"


def test_memory_limits_the_number_of_runs(plans):
    needed = machine._bytes(plans[0])
    assert PROCESS_BYTES < needed < PROCESS_BYTES + 2**30, "the packaged policy takes little more than its process"
    room = available_bytes()
    assert room is None or 2**28 < room <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_is_known_on_linux():
    assert sys.platform != "linux" or available_bytes() is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_runs_that_need_a_gpu_are_refused_on_a_machine_without(tmp_path):
    study = read_study(write_study(tmp_path, options={"trainer.accelerator": "gpu"}))
    with pytest.raises(ValueError, match=r"`trainer.accelerator` must be cpu or auto on a machine without GPUs"):
        slots(RunPlanner(study).plan(study.runs), None)


@pytest.mark.gpu
def test_on_a_gpu_each_run_sees_its_own(tmp_path):
    study = read_study(write_study(tmp_path, options={"trainer.accelerator": "gpu"}))
    places = slots(RunPlanner(study).plan(study.runs), None).environments
    assert len(places) == torch.cuda.device_count()
    assert len({place["CUDA_VISIBLE_DEVICES"] for place in places}) == len(places)
