"""`VLLMServer` against a small real server that samples with the packaged policy, and that fails and restarts."""

import contextlib
import copy
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch
from safetensors.torch import load_file, save_file

from grail_lightning import HFEngine, Loading, Sampling, VLLMServer
from grail_lightning.core.engines.base import TurnRequest
from grail_lightning.core.engines.requests import Request
from grail_lightning.core.engines.vllm.client import ServerGone, _completion
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.sampler import sample_rollouts
from tests.runs import problems
from tests.shell import SHORT, fails_early
from tests.vllm_routes import SmallServer, Worker, says
from tests.vllm_routes import fails as answers_with

GREEDY = Sampling(max_response_length=8, temperature=0)
DRAWN = Sampling(max_response_length=8)
PROBES = 4


@pytest.fixture(autouse=True)
def _few_probes(monkeypatch):
    monkeypatch.setattr("grail_lightning.core.engines.vllm.probe._GROUP", PROBES // 4)


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


def texts(engine, sampling=GREEDY, number=2, group_size=2):
    return engine.generate(problems(number), group_size, sampling, seed=3).texts


def completions(served):
    return [asked for path, _, asked in served.asked if path == "/v1/completions"]


# --- weights --------------------------------------------------------------------------------------------------------


def test_changed_weights_alone_are_pushed_and_sampled_with(policy, served, engine_of, tmp_path):
    engine, theirs = engine_of(served, push_folder=str(tmp_path)), HFEngine()
    for push in (1, 2):
        for _ in range(2):
            engine.update_weights(policy)
        assert served.worker.loads == push
        theirs.update_weights(policy)
        batch, expected = (e.generate(problems(4), 2, GREEDY, seed=3) for e in (engine, theirs))
        assert batch.texts == expected.texts
        assert torch.equal(batch.finished, expected.finished)
        torch.testing.assert_close(batch.sampling_logprobs, expected.sampling_logprobs, atol=1e-4, rtol=0)
        policy.model.get_input_embeddings().weight.data.mul_(1.0 if push == 2 else 1.1)  # Counters do not see it.
    (path, version) = [asked["args"] for _, _, asked in served.asked if asked.get("method") == "grail_load"][-1]
    assert torch.equal(load_file(path)["model.norm.weight"], policy.model.model.norm.weight)
    assert [str(file) for file in tmp_path.iterdir()] == [path], "the newest file alone"
    order = [asked.get("method", path) for path, _, asked in served.asked if path != "/v1/completions"]
    assert order[order.index("grail_load") + 1].startswith("/reset_prefix_cache")
    assert completions(served)[-1]["cache_salt"] == version, "keys and values of earlier weights are told apart"
    engine.close()
    assert not os.path.exists(path)


def test_ranks_on_several_machines_cannot_mean_servers_of_their_own(policy, served, engine_of, monkeypatch):
    """Each machine may have a server at this address, of which the first rank would push to its own alone."""
    here = socket.gethostname()
    for other in (here, "another"):
        monkeypatch.setattr(
            "grail_lightning.core.engines.vllm.server.all_gather_objects",
            lambda mine, other=other: [mine, other if mine == here else mine],
        )
        if other == here:
            engine_of(served).update_weights(policy)
            continue
        with pytest.raises(ValueError, match=rf"but got {served.url} with ranks on .*another.* Write the name of"):
            engine_of(served).update_weights(policy)


def test_another_run_that_replaces_the_file_while_it_is_read_changes_no_weight(policy, tmp_path):
    mine, theirs = ({n: fill * torch.ones_like(v) for n, v in policy.model.state_dict().items()} for fill in (1, 2))
    for name, tensors in (("ours", mine), ("other", theirs)):
        save_file(tensors, tmp_path / name, {"version": name})

    class Overtaken(Worker):
        def reload_weights(self, weights_iterator):
            os.replace(tmp_path / "other", tmp_path / "ours")
            super().reload_weights(weights_iterator)

    worker = Overtaken()
    assert worker.grail_load(str(tmp_path / "ours"), "ours")["version"] == "ours"
    assert torch.equal(worker.policy.model.model.norm.weight, mine["model.norm.weight"])
    assert "holds the weights other in place of ours" in Worker().grail_load(str(tmp_path / "ours"), "ours")["error"]


class Spoilt(Worker):
    """A worker whose weights somebody changes after every push."""

    def grail_load(self, path, version):
        status = super().grail_load(path, version)
        with torch.no_grad():
            self.policy.model.get_output_embeddings().weight[17] += 0.01
        return status


def test_a_server_with_other_weights_stops_the_run(policy, engine_of):
    with SmallServer(Spoilt) as server:
        engine = engine_of(server)
        with pytest.raises(ValueError, match=r"must agree on the log-probabilities of 64 probe tokens after a push"):
            engine.update_weights(policy)
        with pytest.raises(ValueError, match="has pushed no weights yet"):
            texts(engine)
        policy.model.register_buffer("unknown", torch.zeros(3))
        with pytest.raises(ValueError, match=r"could not take the weights of the policy \(KeyError: 'unknown'\)"):
            engine.update_weights(policy)


# --- requests and servers that fail ---------------------------------------------------------------------------------


def test_responses_do_not_depend_on_the_number_of_servers(policy, engine_of, monkeypatch):
    with SmallServer() as one, SmallServer() as two:
        alone = engine_of(one)
        alone.update_weights(policy)
        expected = texts(alone, DRAWN, 5)
        shared = engine_of(two, one)
        shared.update_weights(policy)
        assert texts(shared, DRAWN, 5) == expected
        asked = [len(completions(server)) for server in (one, two)]
        assert asked == [10 + PROBES + 4 + PROBES, 6 + PROBES], "prompts are dealt in turn, a group to one server"
        monkeypatch.setattr("grail_lightning.core.engines.vllm.server.rank", lambda: 1)
        texts(shared, DRAWN, 1)
        assert len(completions(one)) == asked[0] + 2, "ranks begin with different servers"


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
        handler.say(served.worker.complete(handler.asked["prompt"], handler.asked))

    return change


FAULTS = {
    "too long": lambda served: lambda handler: time.sleep(4),
    "status 500": lambda served: answers_with(500),
    "breaks off": lambda served: says(b'{"choices": [', 1000),
    "no JSON": lambda served: says(b"<html></>", 9),
    "no token ids": lambda served: says(b'{"choices": [{"text": "17"}]}', 29),
    "nested": lambda served: says(b"[" * 200_000, 200_000),
    "restarts": restarts,
    "restarts unnoticed": goes_unnoticed,
    "busy": lambda served: answers_with(503),
    "busy, too": lambda served: answers_with(429),
}


def test_a_failure_or_a_restart_changes_no_response(policy, served, engine_of, caplog):
    """A busy server is asked again for what it has not answered alone."""
    engine = engine_of(served, patience_seconds=30)
    engine.update_weights(policy)
    expected = texts(engine, DRAWN)
    for name, fault in FAULTS.items():
        engine._servers[0].answer_seconds = 3 if name == "too long" else 60
        served.faults += [None] * 3 + [fault(served)]
        caplog.clear()
        assert texts(engine, DRAWN) == expected, name
        assert not served.faults
        assert ("4 responses are sampled again" in caplog.text) != name.startswith("busy"), name
        assert ("has other weights than the last push" in caplog.text) == name.startswith("restarts"), name
        assert ("no answer within 3 s" in caplog.text) == (name == "too long"), name


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason"),
    [
        ([5, 6], [-1.0, -1.0], "abort"),
        ([], [], "stop"),
        ([5, 6, 7], [-1.0] * 3, "length"),
        ([5, 6], [-1.0], "stop"),
        ([-1], [-1.0], "stop"),
        ([2**31], [-1.0], "stop"),
        ([3.5], [-1.0], "stop"),
        ([5], [10**400], "stop"),
    ],
)
def test_half_an_answer_counts_as_none(ids, logprobs, reason):
    def answer(ids, logprobs, reason):
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        return {"choices": [choice]}

    request = Request([1], {"max_tokens": 2})
    assert _completion(answer([5, 2**31 - 1], [-1.0, -1.0], "length"), request).ids == [5, 2**31 - 1]
    with pytest.raises(ServerGone, match="an answer without a whole response"):
        _completion(answer(ids, logprobs, reason), request)


def leaves_out(change):
    """A fault: the server's answer with changed `logprobs`."""

    def fault(handler):
        answer = handler.server.served.worker.complete(handler.asked["prompt"], handler.asked)
        handler.say({"choices": [change(choice) for choice in answer["choices"]]})

    return fault


def without(places):
    def change(choice):
        logprobs = choice["logprobs"]["token_logprobs"]
        for place in range(len(logprobs))[places]:
            logprobs[place] = None
        return choice

    return leaves_out(change)


def checked(engine, policy):
    """As a run samples."""
    return sample_rollouts(engine, policy, problems(2), 2, DRAWN, 3)


def test_a_token_without_a_log_probability_is_kept_and_many_of_them_are_named_at_once(policy, served, engine_of):
    """To sample again would not help: the same seeds give the same tokens."""
    engine = engine_of(served)
    engine.update_weights(policy)
    expected = checked(engine, policy)
    before = len(completions(served))
    served.faults += [None, without(slice(1, 2))]
    batch = checked(engine, policy)
    assert batch.texts == expected.texts
    missing = batch.sampling_logprobs.isnan()
    assert missing.nonzero().tolist() == [[served_row(batch, missing), 1]]
    assert torch.equal(batch.sampling_logprobs[~missing], expected.sampling_logprobs[~missing])
    assert len(completions(served)) == before + 4
    served.faults += [without(slice(None))] * 4
    tokens = int(batch.response_mask.sum())
    with pytest.raises(
        ValueError, match=rf"`VLLMServer` must report .* \(null or NaN\) for {tokens} of {tokens} tokens"
    ):
        checked(engine, policy)
    assert len(completions(served)) == before + 8


def served_row(batch, missing):
    """Which of the four requests the server answered second is a matter of threads."""
    return int(missing.any(1).nonzero()[0])


def test_a_probe_whose_log_probabilities_are_missing_says_so(policy, served, engine_of):
    engine = engine_of(served)
    served.faults += [without(slice(None))] * PROBES * 2
    with pytest.raises(ValueError, match=r"`VLLMServer at http.*` must report the log-probability of each token"):
        engine.update_weights(policy)
    served.faults[:] = [without(slice(1, 2))]
    engine.update_weights(policy)


@pytest.mark.parametrize(
    ("fault", "said", "asked"),
    [
        (leaves_out(lambda choice: choice | {"logprobs": None}), "must report log-probabilities, .*`logprobs` None", 1),
        (
            leaves_out(lambda choice: choice | {"logprobs": {"token_logprobs": [-1.0]}}),
            r"failed 2 times .*: it has 1 log-probabilities for \d+ tokens, in .* in the same way: look at their logs",
            2,
        ),
        (says(b'{"choices": []}', 15), "failed 2 times .* it must have `token_ids`.*IndexError: .* in the same way", 2),
        (says(b'{"error": "no such model"}', 26), "failed 2 times .*KeyError: 'choices', in .*no such model", 2),
        (says(b"<html></html>", 13), r"failed 2 times .* \(no JSON: '<html></html>'\)", 2),
    ],
)
def test_an_answer_that_cannot_become_another_is_asked_for_twice_at_most_and_its_cause_is_named(
    fault, said, asked, policy, served, engine_of
):
    engine = engine_of(served)
    engine.update_weights(policy)
    before = len(completions(served))
    served.faults += [fault] * 100
    with pytest.raises(ValueError, match=said) as raised:
        engine.generate(problems(1), 1, DRAWN, seed=3)
    assert len(completions(served)) == before + asked
    assert "answer_seconds" not in str(raised.value)


@pytest.mark.parametrize("state", [None, {"version": None}])
def test_an_answer_that_is_no_state_of_workers_is_one_line(state, served, engine_of):
    served.worker.grail_status = lambda: state
    with pytest.raises(ValueError, match=r"has not answered for 0 s \(an answer without the state of workers: "):
        engine_of(served).check("arithmetic", Loading())


def test_a_server_that_restarts_right_after_a_push_is_given_the_weights_again(policy, served, engine_of, caplog):
    """It has the weights of the checkpoint before and after the batch, so that nothing seems to have changed.

    With the next update what was pushed again is probed.
    """

    class Dying(Worker):
        def grail_load(self, path, version):
            status = super().grail_load(path, version)
            served.make = Spoilt
            served.restart()
            return status

    engine = engine_of(served)
    engine.update_weights(policy)
    expected = texts(engine, DRAWN)
    served.make = Dying
    served.restart()
    texts(engine, DRAWN)
    assert "has lost the weights of the last push" in caplog.text
    assert "4 responses are sampled again" in caplog.text
    with pytest.raises(ValueError, match=r"must agree on the log-probabilities"):
        engine.update_weights(policy)
    served.make = Worker
    served.restart()
    engine.update_weights(policy)
    assert texts(engine, DRAWN) == expected


def test_what_a_server_refuses_or_never_does_ends_the_run_with_one_line(policy, engine_of, monkeypatch):
    monkeypatch.setattr("grail_lightning.core.engines.vllm.server._MOST_ROUNDS", 3)
    with SmallServer() as server:
        engine = engine_of(server, patience_seconds=0.3)
        engine.update_weights(policy)
        for fault, said in (
            (answers_with(400), rf"{server.url} refused /v1/completions \(status 400: .*not now"),
            (answers_with(500), r"failed 3 times to sample 4 responses \(status 500: .*not now"),
            (lambda handler: time.sleep(1), r"failed 2 times .* \(no answer .* raise `engine.answer_seconds`"),
        ):
            engine._servers[0].answer_seconds = 0.3 if "no answer" in said else 60
            server.faults[:] = [fault] * 100
            with pytest.raises(ValueError, match=said):
                texts(engine)
    with pytest.raises(ValueError, match=rf"{server.url} has not answered for 0.3 s \(Connection refused") as raised:
        texts(engine)
    assert re.search(r"VLLM_SERVER_DEV_MODE=1 vllm serve .*--ckpt_path=last", str(raised.value))
    assert "\n" not in str(raised.value)


def test_a_sampling_in_another_thread_can_be_cancelled_and_the_engine_used_again(policy, served, engine_of):
    engine = engine_of(served)
    engine.update_weights(policy)
    expected = texts(engine)
    raised, released = [], threading.Event()

    def sample():
        try:
            texts(engine)
        except CancelledError as error:
            raised.append(error)

    served.faults += [lambda handler: released.wait(30)] * 4
    thread = threading.Thread(target=sample)
    thread.start()
    while served.faults:
        time.sleep(0.01)
    engine.cancel()
    thread.join(10)
    released.set()
    assert len(raised) == 1
    assert texts(engine) == expected
    with engine.turns(GREEDY) as sampler:
        engine.cancel()  # Between two turns, while a tool runs.
        with pytest.raises(CancelledError):
            sampler([TurnRequest(0, problems(1)[0], [1, 2], 3, seed=0)])


# --- before a model is loaded ---------------------------------------------------------------------------------------


def test_the_key_is_sent_as_vllm_expects_it_and_a_path_of_the_url_is_kept(served, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    VLLMServer([f"{served.url}/v1/"]).check("arithmetic", Loading())
    (asked,) = served.asked
    assert asked[:1] == ("/collective_rpc",)
    assert asked[1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"worker": None}, "status 500: .*has no attribute"),
        ({"dev_mode": False}, "status 404: .*Not Found"),
        ({"refuses": 403}, "status 403: .*not now"),
    ],
)
def test_a_server_that_takes_no_weights_is_named_with_its_words_and_what_to_do(server, said, engine_of):
    with SmallServer(**server) as made, pytest.raises(ValueError, match=rf"refused /collective_rpc \({said}") as raised:
        engine_of(made).check("arithmetic", Loading())
    assert re.search(r"takes weights if .* VLLM_SERVER_DEV_MODE=1 .*--worker-ext", str(raised.value))
    assert ("VLLM_API_KEY" in str(raised.value)) == ("status 403" in said), "what a key has nothing to do with"


def test_on_the_command_line_a_missing_server_is_one_line_before_the_model_is_loaded(capsys, tmp_path):
    with SmallServer(worker=None) as server:
        url = server.url
    folder = f"--trainer.default_root_dir={tmp_path}"
    said = fails_early(capsys, "fit", *SHORT, folder, "--model.engine=VLLMServer", f"--model.engine.urls=[{url}]")
    assert f"{url} has not answered for 0 s (Connection refused)" in said
    assert re.search(r"Start it: VLLM_SERVER_DEV_MODE=1 vllm serve /\S+/arithmetic --port \d+ --dtype auto ", said)


def test_a_run_waits_for_servers_that_are_still_loading_if_it_is_told_to(served, engine_of):
    served.loading = time.monotonic() + 0.5
    with pytest.raises(ValueError, match=r"has not answered for 0 s \(status 503"):
        engine_of(served).check("arithmetic", Loading())
    engine_of(served, wait_seconds=30).check("arithmetic", Loading())
    assert time.monotonic() > served.loading


def test_a_fork_of_the_process_asks_servers_by_a_loop_of_its_own(served, engine_of):
    """As a data loader's worker is one. The thread of its parent's loop is not there, so that it waited for ever."""
    engine = engine_of(served)
    engine.check("arithmetic", Loading())
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with contextlib.suppress(BaseException):
            engine.check("arithmetic", Loading())
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert served.count("grail_status") == 2
