"""A server that speaks Search-R1's `/retrieve`, played by a server on this machine."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grail_lightning.environments.search import Search

DOCUMENTS = ['"Mara Voss"\nlives in  Velden.', '"Velden"\nlies in Arland.', "third"]
FOUND = {"result": [[{"document": {"id": "1", "contents": text}, "score": 0.5} for text in DOCUMENTS]]}


@contextmanager
def server(*answers):
    """The address of a server with these answers (status, content), the last one again and again, and its requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answers[min(len(asked), len(answers) - 1)]
            asked.append((self.path, body))
            if status == "silent":
                time.sleep(content)
                return
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def test_a_search_asks_the_server_and_each_document_is_one_line():
    with server((200, FOUND)) as (url, asked):
        environment = Search(retriever=url)
        assert asked == [("/retrieve", {"queries": ["test"], "topk": 1, "return_scores": True})]
        environment.reset(problem="?", path=['"Velden" lies in Arland.'])
        assert environment.search("who?") == '- "Mara Voss" lives in Velden.\n- "Velden" lies in Arland.'
        assert asked[1:] == [("/retrieve", {"queries": ["who?"], "topk": 2, "return_scores": True})]
        assert (environment.score_turn(), environment.search("again") != "", environment.score_turn()) == (
            1.0,
            True,
            0.0,
        )


def test_one_first_request_serves_all_environments_and_documents_without_scores_are_read():
    answer = {"result": [[{"id": "1", "contents": "one"}, "two"]]}
    with server((200, answer)) as (url, asked):
        environments = [Search(retriever=f"{url}/v1/find") for _ in range(5)]
        assert [path for path, _ in asked] == ["/v1/find"]
        assert environments[3].search("x" * 10_000) == "- one\n- two"
        assert len(asked[-1][1]["queries"][0]) == 500


def test_a_request_is_repeated_when_the_server_is_busy_or_silent():
    for trouble in ((503, {}), (429, {}), ("silent", 1.0)):
        with server((200, FOUND), trouble, trouble, (200, FOUND)) as (url, asked):
            environment = Search(retriever=url, timeout_seconds=0.3)
            assert environment.search("q").startswith("- ")
            assert [body["queries"] for _, body in asked] == [["test"], ["q"], ["q"], ["q"]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {}), "answered with status 404"),
        ((503, {}), "answered with status 503"),
        ((302, {}), "status 302"),
        ((200, b"<html>"), 'must answer {"result": .*<html>'),
        ((200, {"result": []}), 'must answer {"result"'),
        ((200, {"result": [[{"document": {"text": "x"}}]]}), 'must answer {"result"'),
        ((200, {"result": [[3]]}), 'must answer {"result"'),
        ((200, b"[" * 200_000), 'must answer {"result"'),
        ((200, b'{"result": [["' + b"x" * 9_000_000 + b'"]]}'), 'must answer {"result"'),
        (("silent", 0.4), "did not answer"),
    ],
)
def test_a_server_that_does_not_speak_the_form_is_refused_before_training(answer, message):
    with (
        server(answer) as (url, _),
        pytest.raises(ValueError, match=f"(?s)`retriever` must be a server .*{message}.*Start it, or correct"),
    ):
        Search(retriever=url, timeout_seconds=0.2, retries=1)


def test_a_server_that_goes_away_is_an_error_of_the_tool_and_the_turn_scores_nothing():
    with server((200, FOUND)) as (url, _):
        environment = Search(retriever=url, timeout_seconds=0.3, retries=0)
        environment.reset(problem="?", path=["third"])
    with pytest.raises(ValueError, match="did not answer"):
        environment.search("q")
    assert environment.score_turn() == 0.0


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x/retrieve", "http://", "retrieve"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="`retriever` must be an address such as"):
        Search(retriever=url)


def test_long_documents_and_halves_of_characters_do_no_harm():
    with server((200, b'{"result": [["' + b"\\ud800 " * 100_000 + b'"]]}')) as (url, _):
        found = Search(retriever=url).search("q")
        assert len(found.encode()) < 5000
