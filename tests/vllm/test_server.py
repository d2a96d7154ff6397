"""`VLLMServer` with real vLLM servers: `make test-vllm`."""

import logging
import signal
import socket
import threading
import time

import pytest
import torch

from grail_lightning import HFEngine, Loading, Sampling, VLLMServer, resolve_policy
from grail_lightning.core.policy.load import load_policy
from tests.runs import problems
from tests.served_ranks import assert_ranks_in_step
from tests.shell import SHORT, main
from tests.test_nodes import go_on, nodes, strike, weights
from tests.vllm_servers import ROOT, Served, python_with_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(python_with_vllm() is None, reason="vLLM is not installed")]

GREEDY = Sampling(max_response_length=32, temperature=0)
DRAWN = Sampling(max_response_length=32)
CHANGEABLE = ("--worker-extension-cls", "tests.vllm_extension.Changeable", "--host", "0.0.0.0")


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    server = Served(resolve_policy("arithmetic"), tmp_path_factory.mktemp("vllm") / "server.log", CHANGEABLE).start()
    server.wait()
    yield server
    server.kill()


@pytest.fixture
def engine(served):
    made = VLLMServer([served.url], patience_seconds=200)
    yield made
    made.close()


@pytest.fixture
def policy():
    """The packaged policy, moved a little: a server that was started with the checkpoint has other weights."""
    moved = load_policy("arithmetic")
    move(moved, 0)
    return moved


def move(policy, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def batch_of(engine, sampling=GREEDY, number=8, group_size=2):
    return engine.generate(problems(number), group_size, sampling, seed=3)


def test_greedy_texts_are_those_of_hf_engine_after_every_push(policy, engine):
    engine.check("arithmetic", Loading())
    theirs = HFEngine()
    for seed in (1, 2, 3):
        engine.update_weights(policy)
        theirs.update_weights(policy)
        batch, expected = batch_of(engine), batch_of(theirs)
        assert batch.texts == expected.texts
        assert torch.equal(batch.response_ids, expected.response_ids)
        torch.testing.assert_close(batch.sampling_logprobs, expected.sampling_logprobs, atol=1e-4, rtol=0)
        move(policy, seed)


def test_weights_reach_a_server_at_another_address_through_a_folder(policy, served, tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Nothing is sent; it tells our own address.
        address = probe.getsockname()[0]
    engine, theirs = VLLMServer([f"http://{address}:{served.port}"], push_folder=str(tmp_path)), HFEngine()
    engine.update_weights(policy)
    theirs.update_weights(policy)
    assert batch_of(engine).texts == batch_of(theirs).texts
    engine.close()


def test_one_weight_that_is_changed_behind_the_engine_is_found(policy, served, engine):
    engine.update_weights(policy)
    engine.verify(policy)
    change = {"method": "change_a_norm", "args": ["model.norm.weight", 5, 0.2]}
    (server,) = engine._servers
    assert engine._await(server.post("/collective_rpc", change)) == {"results": [{}]}
    with pytest.raises(ValueError, match="must agree on the log-probabilities of 256 probe tokens"):
        engine.verify(policy)


def test_a_server_that_is_killed_in_a_batch_and_restarted_changes_nothing(policy, served, engine, caplog):
    engine.update_weights(policy)
    expected = batch_of(engine, DRAWN, 32, 8)

    def kill_and_restart():
        time.sleep(0.3)
        served.kill()
        time.sleep(2)
        served.start()

    disturber = threading.Thread(target=kill_and_restart)
    disturber.start()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        found = batch_of(engine, DRAWN, 32, 8)
    disturber.join()
    assert found.texts == expected.texts
    assert "256 responses are sampled again" in caplog.text
    assert "has other weights than the last push" in caplog.text


# An in-process engine of an earlier file has left vLLM's process group of one, of which Lightning warns.
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_a_run_trains_evaluates_and_tests_with_a_server(served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    engine = ["--model.engine=VLLMServer", f"--model.engine.urls=[{served.url}]"]
    folder = f"--trainer.default_root_dir={tmp_path}"
    options = [*SHORT, *engine, folder, f"--trainer.logger.save_dir={tmp_path}"]
    main(["fit", *options])
    assert "held-out accuracy:" in capsys.readouterr().out
    main(["test", *options, "--ckpt_path=last"])
    assert "arithmetic" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_push_once_and_sample_with_the_same_weights(strategy, served):
    assert_ranks_in_step(strategy, served.url)


def test_nodes_train_beside_a_server_and_go_on_after_one_of_them_was_killed(served, tmp_path):
    """Rows are drawn by their seeds, and the server gets the weights of the checkpoint: nothing differs."""
    options = ["--trainer.strategy=ddp", "--model.engine=VLLMServer", f"--model.engine.urls=[{served.url}]"]
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    for folder in (whole, struck):
        folder.mkdir()
    with nodes(whole, *options) as both:
        assert both.wait(300) == [0, 0], both.said(0)[-3000:] + both.said(1)[-3000:]
    strike(struck, 1, signal.SIGKILL, *options)
    go_on(struck, *options)
    found = weights(struck)
    assert all(torch.equal(weight, found[name]) for name, weight in weights(whole).items())
