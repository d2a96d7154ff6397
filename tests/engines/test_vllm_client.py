"""The client of a vLLM server, against a small real server that fails in every way it can."""

import threading
import time

import pytest

from grail_lightning.engines.vllm.client import ServerClient, ServerGone, ServerRefused, Stopped
from tests.vllm_routes import SmallServer, breaks_off, fails, garbles

BODY = {"prompt": [1], "max_tokens": 1}


def answers(number):
    """An answer that tells its number."""
    return lambda handler: handler.say({"number": number})


def hangs(seconds):
    """A server that answers late."""

    def wait(handler):
        time.sleep(seconds)
        handler.say({})

    return wait


@pytest.fixture
def served():
    with SmallServer(worker=None) as server:
        yield server


@pytest.fixture
def client(served):
    client = ServerClient(served.url, answer_seconds=20)
    yield client
    client.close()


def ask(client):
    return client.call("POST", "/v1/completions", BODY)


@pytest.mark.parametrize("fault", [fails(500), fails(503), fails(429), breaks_off, garbles], ids=range(5))
def test_an_answer_that_is_not_complete_is_asked_for_again(fault, served, client):
    served.faults += [fault, fault, answers(7)]
    said = []
    begun = time.monotonic()
    assert client.until_answered(lambda: ask(client), 20, said.append) == {"number": 7}
    assert len(said) == 1, "it says why it waits, once"
    # Pauses of 0.25 and 0.5 seconds.
    assert 0.7 < time.monotonic() - begun < 10
    assert len(served.asked) == 3


def test_what_the_server_refuses_is_not_asked_again(served, client):
    served.faults += [fails(400)]
    with pytest.raises(ServerRefused, match="status 400: not now"):
        client.until_answered(lambda: ask(client), 20)
    assert len(served.asked) == 1


def test_a_server_that_stays_away_is_given_up_after_the_stated_time():
    with SmallServer(worker=None) as server:
        url = server.url
    begun, client = time.monotonic(), ServerClient(url, answer_seconds=20)
    with pytest.raises(ServerGone, match="refused"):
        client.until_answered(lambda: ask(client), 1.0)
    assert 1.0 <= time.monotonic() - begun < 5


def test_a_server_that_does_not_answer_in_time_counts_as_gone(served):
    served.faults += [hangs(3)]
    with pytest.raises(ServerGone, match="no answer in time"):
        ask(ServerClient(served.url, answer_seconds=0.3))


def test_answers_come_in_the_order_of_the_requests(served, client):
    def echo(handler):
        number = handler.asked["prompt"][0]
        time.sleep(0.02 * (12 - number))  # The last one is answered first.
        handler.say({"number": number})

    served.faults += [echo] * 12
    got = client.many("/v1/completions", [{"prompt": [number]} for number in range(12)], at_once=12)
    assert [answer["number"] for answer in got] == list(range(12))


def test_requests_are_in_flight_side_by_side_and_at_most_as_many_as_asked_for(served, client):
    flying, most, lock = 0, 0, threading.Lock()

    def counted(handler):
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.1)
        with lock:
            flying -= 1
        handler.say({})

    served.faults += [counted] * 20
    client.many("/v1/completions", [BODY] * 20, at_once=5)
    assert most == 5


def test_if_one_request_fails_nobody_waits_for_the_others(served, client):
    served.faults += [hangs(15), hangs(15), breaks_off]
    begun = time.monotonic()
    with pytest.raises(ServerGone, match="broke off"):
        client.many("/v1/completions", [BODY] * 3, at_once=3)
    assert time.monotonic() - begun < 10
    served.faults += [answers(1)]
    assert ask(client) == {"number": 1}, "the client can be used afterwards"


def test_closing_ends_requests_that_wait_in_other_threads(served, client):
    served.faults += [hangs(15)]
    raised = []

    def wait():
        try:
            ask(client)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not served.asked:
        time.sleep(0.01)
    client.close()
    thread.join(5)
    assert [type(error) for error in raised] == [Stopped]
    with pytest.raises(Stopped):
        ask(client)
    client.reopen()
    served.faults[:] = [answers(2)]
    assert ask(client) == {"number": 2}


def test_an_idle_connection_that_the_server_has_closed_is_no_failure(served, client):
    def answer_and_close(handler):
        handler.say({"number": 1})
        handler.close_connection = True

    served.faults += [answer_and_close, answers(2)]
    assert ask(client) == {"number": 1}
    time.sleep(0.1)
    assert ask(client) == {"number": 2}


def test_the_key_is_sent_as_vllm_expects_it(served):
    served.faults += [answers(1)]
    client = ServerClient(served.url, 20, api_key="secret")
    ask(client)
    client.close()
    assert served.asked[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host:1", "http://", "http://host:port", "http://a:b@host:1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="must hold addresses such as http:"):
        ServerClient(url, 20)


def test_the_path_of_the_openai_interface_may_be_given(served):
    served.faults += [answers(3)]
    client = ServerClient(f"{served.url}/v1/", 20)
    assert ask(client) == {"number": 3}
    client.close()
