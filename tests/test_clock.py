"""Seconds of the phases of a step."""

import time

import pytest
import torch

from grail_lightning.core.runtime.clock import PhaseClock


def test_the_time_of_an_inner_phase_is_its_own(monkeypatch):
    clock, now = PhaseClock(torch.device("cpu")), iter([0.0, 1.0, 4.0, 9.0, 10.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    with clock.phase("update"), clock.phase("credit"):
        pass
    with clock.phase("update"):
        pass
    assert clock.seconds == pytest.approx({"update": 1 + 5 + 6, "credit": 3})
