"""`VLLMServer` against a small real server that samples with the packaged policy, and that fails and restarts."""

import copy
import logging
import threading
import time

import pytest
import torch

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine, VLLMServer
from grail_lightning.engines.vllm.client import Stopped
from grail_lightning.engines.vllm.protocol import deal
from grail_lightning.policy import load_policy
from tests.runs import problems
from tests.vllm_routes import SmallServer, Worker, breaks_off, garbles, leaves_out
from tests.vllm_routes import fails as answers_with

GREEDY = Sampling(max_response_length=8, temperature=0)
DRAWN = Sampling(max_response_length=8)


@pytest.fixture
def served():
    with SmallServer() as server:
        yield server


@pytest.fixture
def engine_of():
    made = []

    def make(*servers, **options):
        made.append(VLLMServer([server.url for server in servers], **{"patience_seconds": 5} | options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def packaged():
    return load_policy("arithmetic")


@pytest.fixture
def policy(packaged):
    """The packaged policy, moved a little: a server that was started with the checkpoint has other weights."""
    moved = copy.deepcopy(packaged)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return moved


def texts(engine, sampling=GREEDY, number=4, group_size=2):
    return engine.generate(problems(number), group_size, sampling, seed=3).texts


def test_greedy_texts_are_those_of_the_policy_before_and_after_a_push(policy, served, engine_of):
    ours, theirs = engine_of(served), HFEngine()
    for _ in range(2):
        ours.update_weights(policy)
        theirs.update_weights(policy)
        batch, expected = (e.generate(problems(4), 2, GREEDY, seed=3) for e in (ours, theirs))
        assert batch.texts == expected.texts
        assert torch.equal(batch.finished, expected.finished)
        torch.testing.assert_close(batch.sampling_logprobs, expected.sampling_logprobs, atol=1e-4, rtol=0)
        with torch.no_grad():
            policy.model.get_input_embeddings().weight.mul_(1.1)
    assert served.worker.loads == 2


def test_weights_that_have_not_changed_are_not_pushed_again(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    engine.update_weights(policy)
    assert served.worker.loads == 1
    next(policy.parameters()).data[0, 0] += 1  # Counters of changes do not see it.
    engine.update_weights(policy)
    assert served.worker.loads == 2


def test_responses_do_not_depend_on_the_number_of_servers(policy, engine_of):
    with SmallServer() as one, SmallServer() as two, SmallServer() as three:
        alone, shared = engine_of(one), engine_of(three, two)
        for engine in (alone, shared):
            engine.update_weights(policy)
        assert texts(alone, DRAWN, 5) == texts(shared, DRAWN, 5)
        asked = [sum(path == "/v1/completions" for path, *_ in server.asked) for server in (one, two, three)]
        probes = 16
        assert asked == [10 + probes, 4 + probes, 6 + probes]


def test_prompts_are_dealt_in_turn_and_ranks_begin_with_different_servers():
    a, b, c = [1], [2], [3]
    assert deal([a, a, b, b, c, c], 2, rank=0) == [[0, 1, 4, 5], [2, 3]]
    assert deal([a, a, b, b, c, c], 2, rank=1) == [[2, 3], [0, 1, 4, 5]]
    assert deal([a, b, a], 1, rank=5) == [[0, 1, 2]]
    assert deal([], 2, rank=0) == [[], []]


@pytest.mark.parametrize("fault", [answers_with(500), breaks_off, garbles, leaves_out], ids=range(4))
def test_a_failed_answer_changes_nothing(fault, policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    expected = texts(engine, DRAWN)
    for place in (0, 3):
        with served.lock:
            served.faults += [None] * place + [fault]
        assert texts(engine, DRAWN) == expected
        assert not served.faults


def restarts(served):
    """A fault: the server is killed with a request in flight, and comes back with the weights of the checkpoint."""

    def kill(handler):
        served.restart()
        handler.close_connection = True

    return kill


def goes_unnoticed(served):
    """A fault: the server has restarted between two requests, so that none of them fails."""

    def change(handler):
        served.restart()
        ids, logprobs = served.worker.complete(handler.asked["prompt"], handler.asked)
        handler.say({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]})

    return change


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("how", [restarts, goes_unnoticed])
def test_responses_of_a_restarted_server_with_old_weights_do_not_count(how, place, policy, served, engine_of, caplog):
    engine = engine_of(served)
    engine.update_weights(policy)
    expected = texts(engine, DRAWN)
    served.faults += [None] * place + [how(served)]
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        assert texts(engine, DRAWN) == expected
    assert "has other weights than the last push (those it was started with" in caplog.text
    assert "8 responses of this batch are sampled again" in caplog.text


def test_a_server_that_restarts_between_batches_is_noticed_before_the_next(policy, served, engine_of, caplog):
    engine = engine_of(served)
    engine.update_weights(policy)
    expected = texts(engine)
    served.restart()
    assert texts(engine) == expected
    assert caplog.text.count("pushed again") == 1


def test_a_server_that_always_fails_ends_the_run_with_the_reason(policy, served, engine_of, monkeypatch):
    monkeypatch.setattr("grail_lightning.engines.vllm.remote._MOST_ROUNDS", 3)
    engine = engine_of(served)
    engine.update_weights(policy)
    served.faults += [answers_with(500)] * 100
    with pytest.raises(ValueError, match=rf"{served.url} failed 3 times to sample 8 responses \(status 500: not now\)"):
        texts(engine)


def test_a_server_that_is_gone_ends_the_run_with_how_to_go_on(policy, engine_of):
    with SmallServer() as server:
        engine = engine_of(server, patience_seconds=0.5)
        engine.update_weights(policy)
    with pytest.raises(ValueError, match="Connection refused") as raised:
        texts(engine)
    said = str(raised.value)
    assert f"{server.url} has not answered for 0.5 s" in said
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in said
    assert "--ckpt_path=last" in said
    assert "\n" not in said


def test_a_response_for_which_the_server_has_no_room_is_one_line(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    longest = max(len(policy.encode(prompt.messages)) for prompt in problems(2)) + 48
    served.worker.vllm_config.model_config.max_model_len = 50
    with pytest.raises(ValueError, match=rf"has room for 50 tokens .* but {longest} are asked for. Start it with a la"):
        engine.generate(problems(2), 1, Sampling(max_response_length=48), seed=0)


def test_a_sampling_in_another_thread_can_be_cancelled_and_the_engine_used_again(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    expected = texts(engine)
    raised, released = [], threading.Event()

    def sample():
        try:
            texts(engine)
        except Stopped as error:
            raised.append(error)

    served.faults += [lambda handler: released.wait(30)] * 8
    thread = threading.Thread(target=sample)
    thread.start()
    while served.faults:
        time.sleep(0.01)
    engine.cancel()
    thread.join(10)
    released.set()
    assert len(raised) == 1
    assert texts(engine) == expected


class Spoilt(Worker):
    """A worker whose weights somebody changes after every push."""

    def grail_confirm(self, version):
        with torch.no_grad():
            self.policy.model.get_output_embeddings().weight[17] += 0.01
        return super().grail_confirm(version)


def test_the_probe_stops_a_run_whose_server_has_other_weights(policy, engine_of):
    with SmallServer(Spoilt) as server:
        engine = engine_of(server)
        with pytest.raises(ValueError, match=r"must agree on the log-probabilities of 256 probe tokens after push 1"):
            engine.update_weights(policy)
        with pytest.raises(ValueError, match="has pushed no weights yet"):
            texts(engine)


def test_one_weight_that_is_changed_behind_the_engine_is_found_by_verify(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    engine.verify(policy)
    with torch.no_grad():
        served.worker.policy.model.get_output_embeddings().weight[17] += 0.01
    with pytest.raises(ValueError, match="must agree on the log-probabilities"):
        engine.verify(policy)


def test_a_restarted_server_that_takes_the_weights_wrongly_is_found_without_the_policy(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    served.make = Spoilt
    served.restart()
    with pytest.raises(ValueError, match=r"must agree on the log-probabilities of .* after a restart"):
        texts(engine)


def test_weights_that_do_not_fit_are_one_line_and_the_server_takes_no_others(policy, served, engine_of):
    engine = engine_of(served)
    policy.model.register_buffer("unknown", torch.zeros(3))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"could not load the weights of the policy .*unknown.* has a part of them"
        ):
            engine.update_weights(policy)


def test_keys_and_values_of_earlier_weights_are_dropped_and_told_apart(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    order = [asked.get("method", path) for path, _, asked in served.asked if path != "/v1/completions"]
    wanted = ["grail_load", "/reset_prefix_cache?reset_running_requests=true", "grail_confirm"]
    assert [name for name in order if name in wanted] == wanted
    salts = {asked["cache_salt"] for path, _, asked in served.asked if path == "/v1/completions"}
    assert salts == {served.worker.grail_version}
