"""Ranks notice that another one has ended. The ranks are threads here, with a real store between them."""

import gc
import queue
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from grail_lightning.callbacks import Watchdog
from grail_lightning.callbacks.watchdog import lost_rank
from grail_lightning.cli.app import mistakes_in_one_line
from grail_lightning.runtime.heartbeat import Heartbeat, connection_lost
from tests.runs import batches, module, trainer

PATIENCE = 2.0  # Seconds; heartbeats come twenty times as often.


class Ranks:
    """Three ranks, and what each was told."""

    def __init__(self, number=3, patience=PATIENCE):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
        self.told = [queue.SimpleQueue() for _ in range(number)]
        self.beats = [
            Heartbeat(self.store.clone(), rank, number, patience, self.told[rank].put) for rank in range(number)
        ]

    def start(self, *ranks):
        for rank in ranks:
            self.beats[rank].start()
        end = time.monotonic() + 10
        while any(self.store.add(f"beat/{rank}", 0) < 3 for rank in ranks) and time.monotonic() < end:
            time.sleep(0.05)

    def kill(self, rank):
        """As a signal does: without a word."""
        self.beats[rank]._over.set()

    def end(self):
        for beat in self.beats:
            beat.stop()


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.end()


def test_a_rank_that_is_killed_is_named_to_every_other_one(ranks):
    ranks.start(0, 1, 2)
    ranks.kill(1)
    for rank in (0, 2):
        said = ranks.told[rank].get(timeout=10 * PATIENCE)
        assert said.startswith("rank 1 on ")
        assert said.endswith(f"has given no sign of life for {PATIENCE:g} seconds")
    assert ranks.told[1].empty()


def test_a_rank_that_is_killed_before_its_first_interval_is_over_is_missed_too(ranks):
    ranks.beats[1].start()
    ranks.kill(1)
    ranks.start(0)
    assert ranks.told[0].get(timeout=10 * PATIENCE).startswith("rank 1 on ")


def test_ranks_that_are_slow_to_begin_or_have_finished_are_not_missed(ranks):
    ranks.start(0, 1)
    ranks.beats[1].stop()
    time.sleep(2 * PATIENCE)  # Rank 2 has never begun; rank 1 is done.
    assert all(told.empty() for told in ranks.told)
    ranks.start(2)
    assert all(told.empty() for told in ranks.told)


def test_the_error_of_a_rank_is_the_reason_of_all(ranks):
    ranks.start(0, 1, 2)
    ranks.beats[2].stop("rank 2 has ended with ValueError: a wrong reward")
    ranks.beats[1].stop("rank 1 has ended with ValueError: a later one")
    assert ranks.told[0].get(timeout=10 * PATIENCE) == "rank 2 has ended with ValueError: a wrong reward"


def test_the_cause_of_a_broken_connection_is_the_rank_without_heartbeats(ranks):
    """Several survivors ask at a time: none of them names another."""
    ranks.start(0, 1, 2)
    ranks.kill(0)
    assert ranks.beats[2].cause().startswith("rank 0 on ")
    assert ranks.beats[1].cause().startswith("rank 0 on ")
    assert all(told.empty() for told in ranks.told), "a rank that asks is not told"


def test_a_store_that_has_ended_is_noticed():
    made = Ranks(2)
    made.start(0, 1)
    made.beats[0]._over.set()
    made.beats[0]._thread.join()
    made.store = made.beats[0]._store = None  # The server ends with its last owner.
    gc.collect()
    said = made.told[1].get(timeout=10 * PATIENCE)
    assert said.startswith("the process that holds the store of the run cannot be reached")
    made.beats[1].stop()


def test_errors_of_collectives_are_told_from_others():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:58757: Connection reset"
    assert connection_lost(RuntimeError(gloo))
    assert connection_lost(torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"))
    assert not connection_lost(RuntimeError("CUDA out of memory"))
    assert not connection_lost(ConnectionResetError("Connection reset by peer")), "a server's, say"


def test_a_lost_rank_is_one_line_on_the_command_line(capsys, monkeypatch):
    monkeypatch.delenv("GRAIL_DEBUG", raising=False)
    error = RuntimeError("gloo: Connection closed by peer")
    assert lost_rank(error) is None
    error.add_note("Rank 1 on b has ended. Go on from the last checkpoint: the same command with `--ckpt_path=last`.")
    with pytest.raises(SystemExit) as stop, mistakes_in_one_line():
        raise error
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("grail-lightning: error: Rank 1 on b has ended. Go on from the last checkpoint")


def test_one_process_has_no_watchdog_and_a_wrong_patience_is_told():
    watchdog = Watchdog()
    trainer(1, watchdog).fit(module({"group_size": 2}), batches(1, size=1))
    assert watchdog._heartbeat is None
    watchdog.before_meeting(trainer(1))
    assert watchdog._meeting is None
    for name in ("patience_seconds", "meeting_seconds"):
        with pytest.raises(ValueError, match=rf"`{name}` must be 0 \(off\) or positive, but got -1"):
            Watchdog(**{name: -1})
