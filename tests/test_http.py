"""The client of servers: what difficult ones cost, and that threads, loops and forks do not disturb it."""

import asyncio
import gc
import gzip
import json
import multiprocessing
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from grail_lightning.core.runtime.http import (
    Answer,
    LongAnswer,
    NoAnswer,
    SlowAnswer,
    check_address,
    post,
    post_blocking,
    post_json,
)
from tests.http_server import server


@contextmanager
def says(*parts, pause=0.0, again=False):
    """The address of a server that sends these bytes whatever it is asked, or the last of them without an end."""

    def send(connection):
        with connection:
            try:
                connection.recv(65536)
                for part in parts:
                    connection.sendall(part)
                while again and not done.is_set():
                    connection.sendall(parts[-1])
                    done.wait(pause)
            except OSError:
                pass  # The client has gone, as it may.

    def accept():
        while not done.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=send, args=(connection,)))
            threads[-1].start()

    done, threads = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/path"
        done.set()
        listening.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def whole(body, *headers):
    """A complete answer of these bytes."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


OPEN = b"HTTP/1.1 200 OK\r\n\r\n"  # The answer ends with the connection.


def test_a_request_is_json_with_a_key_and_any_status_is_an_answer():
    """Half of a surrogate pair, which a policy may write, is sent as it stands."""
    with server(lambda body, n: (200 + 204 * (n == 2), {"heard": body})) as (url, asked):
        body = {"queries": ["\ud800 é"]}
        assert post_blocking(f"{url}/a", body, seconds=9, key="K") == Answer(200, json.dumps({"heard": body}))
        assert asyncio.run(post(f"{url}/b", body, seconds=9)).status == 404
        assert asked == [("/a", body, "Bearer K"), ("/b", body, None)]


@pytest.mark.parametrize(
    ("parts", "forever", "error", "told"),
    [
        ((), True, SlowAnswer, "no answer within 0.3 s"),
        ((OPEN,), True, SlowAnswer, "no answer within 0.3 s"),
        ((OPEN, b" "), True, SlowAnswer, "no answer within 0.3 s"),
        ((b"HTTP/1.1 200 OK\r\n", b"X-A: y\r\n"), True, NoAnswer, "headers"),
        ((), False, NoAnswer, "Server disconnected"),
        ((b"hello\r\n\r\n",), False, NoAnswer, "Bad status line"),
        ((whole(b"{}")[:-1],), False, NoAnswer, "not completed"),
        ((whole(b"no gzip", "Content-Encoding: gzip"),), False, NoAnswer, "gzip"),
    ],
)
def test_a_server_that_gives_no_whole_answer_is_given_up_in_time(parts, forever, error, told):
    """It hangs, before its answer or in the middle; it sends byte after byte, or header after header; it breaks off."""
    with says(*(parts or (b"",)), again=forever, pause=0.001 if len(parts) == 2 else 9) as url:
        begun = time.monotonic()
        with pytest.raises(error, match=told) as raised:
            post_blocking(url, {}, seconds=0.3 if error is SlowAnswer else 20)
        assert type(raised.value) is error
        assert time.monotonic() - begun < 10
        assert str(raised.value).isprintable()


def test_an_answer_is_read_up_to_its_limit_also_where_it_is_packed():
    """400 MB of spaces are 400 kB."""
    with says(OPEN, b"x" * 65536, again=True) as url, pytest.raises(LongAnswer, match="of more than 8,000,000 bytes"):
        post_blocking(url, {}, seconds=30)
    packed = gzip.compress(b" " * 40_000_000)
    with says(whole(packed, "Content-Encoding: gzip")) as url:
        with pytest.raises(LongAnswer, match="of more than 39,999,999 bytes"):
            post_blocking(url, {}, seconds=30, max_bytes=39_999_999)
        assert post_blocking(url, {}, seconds=30, max_bytes=40_000_000).text == " " * 40_000_000


def test_a_redirect_is_an_answer_and_what_it_leads_to_is_not_asked():
    location = "Location: http://127.0.0.1:9/elsewhere"
    for status in (301, 302, 303, 307, 308):
        with says(whole(b"", location).replace(b"200 OK", b"%d There" % status)) as url:
            assert post_blocking(url, {}, seconds=9, key="K") == Answer(
                status, "redirected to http://127.0.0.1:9/elsewhere"
            )


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with server(lambda body, n: (200, [])) as (url, asked):
        assert post_json(url, {}, seconds=9) == []
        assert len(asked) == 1


def test_the_reason_of_a_connection_that_fails_is_that_of_the_system():
    with pytest.raises(NoAnswer, match=r"^Connection refused$"):
        post_blocking("http://127.0.0.1:9", {}, seconds=9)
    with pytest.raises(NoAnswer, match="100000"):
        post_blocking("http://127.0.0.1:100000", {}, seconds=9)
    with closing(socket.socket()) as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address, held = full.getsockname(), [socket.socket() for _ in range(4)]
        for waiting in held:
            waiting.setblocking(False)
            waiting.connect_ex(address)
        with pytest.raises(SlowAnswer):
            post_blocking(f"http://127.0.0.1:{address[1]}", {}, seconds=0.3)
        for waiting in held:
            waiting.close()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, "silent"])
def test_a_busy_or_silent_server_is_asked_again_and_the_last_answer_is_told(status):
    content, told = (1.0, "did not answer") if status == "silent" else ({}, f"answered with status {status} and '{{}}'")
    with server(lambda body, n: (200, [n]) if n == 3 else (status, content)) as (url, asked):
        assert post_json(url, {}, seconds=0.3, retries=2) == [3]
        with pytest.raises(ValueError, match=told):
            post_json(url, {}, seconds=0.3)
        assert len(asked) == 4


def test_what_would_be_the_same_the_next_time_is_not_asked_for_again():
    answers = [
        (404, b"none"),
        (200, b"<html>"),
        (200, b"[" * 200_000),
        (200, b""),
        (201, b"[]"),
        (200, b" " * 8_000_001),
    ]
    with server(lambda body, n: answers[n - 1]) as (url, asked):
        for _ in answers[:-1]:
            with pytest.raises(ValueError, match=r"answered with status \d+ and '.*', but not with JSON"):
                post_json(url, {}, seconds=9, retries=3)
        with pytest.raises(ValueError, match="gave an answer of more than 8,000,000 bytes"):
            post_json(url, {}, seconds=9, retries=3)
        assert len(asked) == len(answers)


def test_threads_and_a_thread_whose_loop_runs_ask_side_by_side():
    """As that of a notebook does. The loop of this thread, which may be set and not run, stays as it is."""

    async def inside():
        return post_json(url, {"from": "a loop"}, seconds=9)

    def slowly(body, n):
        time.sleep(0.2)
        return 200, body

    with server(slowly) as (url, asked):
        begun = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            bodies = [{"number": n} for n in range(32)]
            assert [*pool.map(lambda body: post_json(url, body, seconds=9), bodies)] == bodies
        assert time.monotonic() - begun < 0.2 * len(asked) / 2
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            post_json(url, {}, seconds=9)
            assert asyncio.get_event_loop() is loop
            assert loop.run_until_complete(inside()) == {"from": "a loop"}
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        gc.collect()  # What is left open is a warning, and so an error.


def _asks(url, results):
    results.put(post_json(url, {"from": "a fork"}, seconds=9))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_asks_although_its_parent_is_asking():
    fork, release = multiprocessing.get_context("fork"), threading.Event()

    def answer(body, n):
        if body:
            return 200, body
        release.wait(20)
        return 200, "parent"

    with server(answer) as (url, asked), ThreadPoolExecutor(1) as pool:
        mine = pool.submit(post_json, url, {}, seconds=20)
        while not asked:
            time.sleep(0.01)
        results = fork.Queue()
        child = fork.Process(target=_asks, args=(url, results))
        child.start()
        assert results.get(timeout=20) == {"from": "a fork"}
        child.join(20)
        release.set()
        assert mine.result() == "parent"
        assert child.exitcode == 0


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x/retrieve", "http://", "http://[x", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"`judge.url` must be an address such as http://h, but got '"):
        check_address("judge.url", url, "http://h")
