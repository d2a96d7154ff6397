"""Two trainer nodes, started by `torchrun`, beside a real vLLM server: `make test-vllm`."""

import signal

import pytest
import torch

from grail_lightning.policy.options import resolve_policy
from tests.nodes import go_on, nodes, strike, weights
from tests.vllm_servers import Served, python_with_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(python_with_vllm() is None, reason="vLLM is not installed")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The options of both nodes."""
    server = Served(resolve_policy("arithmetic"), tmp_path_factory.mktemp("vllm") / "server.log").start()
    server.wait()
    yield ["--trainer.strategy=ddp", "--model.engine=VLLMServer", f"--model.engine.urls=[{server.url}]"]
    server.kill()


def test_nodes_train_beside_a_server_and_go_on_after_one_of_them_was_killed(engine, tmp_path):
    """Rows are drawn by their seeds, and the server gets the weights of the checkpoint: nothing differs."""
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    whole.mkdir()
    struck.mkdir()
    with nodes(whole, *engine) as both:
        assert both.wait(300) == [0, 0], both.said(0)[-3000:] + both.said(1)[-3000:]
    ended = strike(struck, 1, signal.SIGKILL, *engine)
    resumed = go_on(struck, *engine)
    expected, found = weights(whole), weights(struck)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    print(f"\n{ended:.1f} s to the end, {resumed:.1f} s to go on")
