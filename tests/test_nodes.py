"""Two nodes of one process each, started by `torchrun` on this machine: they train together, and one may die."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.shell import RUN, SHORT
from tests.vllm_servers import free_port

pytestmark = pytest.mark.slow

STEPS = 40
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
OPTIONS = [
    *SHORT,
    "--trainer.num_nodes=2",
    "--trainer.devices=1",
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=1000",
    "--evaluation.at_start=false",
    "--evaluation.at_end=false",
    "--last_checkpoint.every_n_batches=1",
    "--model.sampling.max_response_length=16",
]


class Nodes:
    """What `torchrun` has started on each node, and what it prints."""

    def __init__(self, folder, *options):
        self.folder, port = folder, free_port()
        self.running = [self._start(node, port, options) for node in range(2)]

    def _start(self, node, port, options):
        program = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        program += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        program += ["-m", "grail_lightning", "fit", *OPTIONS, *options]
        with (self.folder / f"{node}.txt").open("w") as file:
            return subprocess.Popen(
                program, stdout=file, stderr=file, cwd=self.folder, env=ENVIRONMENT, start_new_session=True
            )

    def trainer(self, node):
        """The id of the one training process of a node."""
        (child,) = self._children(node)
        return child

    def left(self):
        """The ids of all processes that still run; those of the training processes first."""
        agents = [(node, agent) for node, agent in enumerate(self.running) if agent.poll() is None]
        return [child for node, _ in agents for child in self._children(node)] + [agent.pid for _, agent in agents]

    def _children(self, node):
        agent = self.running[node].pid
        with suppress(FileNotFoundError):
            return [int(child) for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        return []

    def said(self, node):
        """All that a node has printed."""
        return (self.folder / f"{node}.txt").read_text()

    def wait(self, seconds):
        """The exit codes."""
        end = time.monotonic() + seconds
        return [agent.wait(max(end - time.monotonic(), 0.1)) for agent in self.running]


@contextmanager
def nodes(folder, *options):
    """Both nodes; what is left of them in the end is killed."""
    made = Nodes(folder, *options)
    try:
        yield made
    finally:
        for left in made.left():  # Each has a process group of its own.
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        made.wait(10)


def saved(folder):
    """The step of the last checkpoint; 0 before the first."""
    file = folder / RUN / "checkpoints" / "last.ckpt"
    with suppress(FileNotFoundError):  # A folder of shards is away for a moment when a newer one takes its place.
        content = file / "meta.pt" if file.is_dir() else file
        return torch.load(content, weights_only=False, map_location="cpu")["global_step"]
    return 0


def until(condition, seconds=180):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too slow"
        time.sleep(0.05)


def weights(folder):
    """Those that a finished run has exported."""
    return load_file(folder / RUN / "export" / "model.safetensors")


def strike(folder, victim, how, *options):
    """Send a signal to a node's training process; the seconds until the other node has ended.

    The other one must end within a minute, with an exit code other than 0.
    """
    with nodes(folder, *options) as both:
        until(lambda: saved(folder) >= 8)
        os.kill(both.trainer(victim), how)
        struck = time.monotonic()
        assert both.running[1 - victim].wait(60) != 0
        return time.monotonic() - struck


def go_on(folder, *options):
    """The same command with `--ckpt_path=last`, to its end; the seconds until its first new checkpoint."""
    begun = saved(folder)
    assert 8 <= begun < STEPS
    restarted = time.monotonic()
    with nodes(folder, *options, "--ckpt_path=last") as both:
        until(lambda: saved(folder) > begun)
        resumed = time.monotonic() - restarted
        assert both.wait(300) == [0, 0], both.said(0)[-3000:]
    return resumed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns the weights of an undisturbed run with a strategy."""

    @cache
    def of(strategy):
        folder = tmp_path_factory.mktemp("undisturbed")
        with nodes(folder, strategy) as both:
            assert both.wait(300) == [0, 0], both.said(0)[-3000:] + both.said(1)[-3000:]
        return weights(folder)

    return of


# As a kernel that is short of memory ends a process.
@pytest.mark.parametrize(
    ("victim", "how", "strategy"),
    [
        (1, signal.SIGKILL, "ddp"),
        (0, signal.SIGKILL, "ddp"),
        (1, signal.SIGKILL, "ModelParallelStrategy"),
    ],
)
def test_the_others_end_within_a_minute_and_a_restart_ends_with_the_weights_of_an_undisturbed_run(
    undisturbed, victim, how, strategy, tmp_path
):
    strategy = f"--trainer.strategy={strategy}"
    expected = undisturbed(strategy)
    ended = strike(tmp_path, victim, how, strategy)
    resumed = go_on(tmp_path, strategy)
    found = weights(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    print(f"\n{strategy} {how.name} to rank {victim}: {ended:.1f} s to the end, {resumed:.1f} s to go on")


def test_an_error_of_one_rank_ends_all(tmp_path):
    with nodes(tmp_path, "--trainer.strategy=ddp", "--model.engine=tests.failing_rank.Failing") as both:
        assert 0 not in both.wait(240)
        assert "this share of the batch is wrong" in both.said(1)
