"""A server that speaks Search-R1's `/retrieve`, played by a server on this machine."""

import pytest

from grail_lightning.worlds.search.environment import Search
from tests.http_server import server

DOCUMENTS = ['"Mara Voss"\nlives in  Velden.', '"Velden"\nlies in Arland.', "third"]
FOUND = {"result": [[{"document": {"id": "1", "contents": text}, "score": 0.5} for text in DOCUMENTS]]}


def serving(*answers):
    """A server with these answers (status, content), the last one again and again."""
    return server(lambda _, n: answers[min(n, len(answers)) - 1])


def test_a_search_asks_the_server_and_each_document_is_one_line():
    with serving((200, FOUND)) as (url, asked):
        environment = Search(retriever=url)
        environment.reset(problem="?", path=['"Velden" lies in Arland.'])
        assert environment.search("who?") == '- "Mara Voss" lives in Velden.\n- "Velden" lies in Arland.'
        assert asked == [
            ("/retrieve", {"queries": [query], "topk": k, "return_scores": True}, None)
            for query, k in (("test", 1), ("who?", 2))
        ]
        assert environment.score_turn() == 1.0
        assert environment.search("again")
        assert environment.score_turn() == 0.0
    with pytest.raises(ValueError, match="did not answer"):
        environment.search("q")
    assert environment.score_turn() == 0.0, "a server that goes away is an error of the tool"


def test_one_first_request_serves_all_environments_and_documents_of_other_forms_are_read():
    long = "\ud800 " * 100_000
    with serving((200, {"result": [[{"id": "1", "contents": "one"}, long]]})) as (url, asked):
        environments = [Search(retriever=f"{url}/v1/find") for _ in range(5)]
        assert [path for path, *_ in asked] == ["/v1/find"]
        found = environments[3].search("x" * 10_000)
        assert found.startswith("- one\n- ?")
        assert len(found.encode()) < 5000
        assert len(asked[-1][1]["queries"][0]) == 500


@pytest.mark.parametrize(("troubles", "seconds"), [([(503, {}), (429, {})], 30.0), ([("silent", 2.0)] * 2, 1.0)])
def test_a_request_is_repeated_when_the_server_is_busy_or_silent(troubles, seconds):
    with serving((200, FOUND), *troubles, (200, FOUND)) as (url, asked):
        environment = Search(retriever=url, timeout_seconds=seconds)
        assert environment.search("q").startswith("- ")
        assert [body["queries"] for _, body, _ in asked] == [["test"], ["q"], ["q"], ["q"]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {}), "answered with status 404"),
        ((302, {}), "status 302 and 'redirected to nowhere'"),
        ((200, b"<html>"), "<html>.*, but not with JSON"),
        ((200, b"[" * 200_000), "but not with JSON"),
        ((200, b'{"result": [["' + b"x" * 9_000_000 + b'"]]}'), "gave an answer of more than 8,000,000 bytes"),
        ((200, {"result": []}), 'must answer {"result"'),
        ((200, {"result": [[{"document": {"text": "x"}}]]}), 'must answer {"result"'),
        ((200, {"result": [[3]]}), 'must answer {"result"'),
        (("silent", 0.4), "did not answer"),
    ],
)
def test_a_server_that_does_not_speak_the_form_is_refused_before_training(answer, message):
    with (
        serving(answer) as (url, _),
        pytest.raises(ValueError, match=f"(?s)`retriever` must be a server .*{message}.*Start it, or correct"),
    ):
        Search(retriever=url, timeout_seconds=0.2 if answer[0] == "silent" else 30.0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x/retrieve", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="`retriever` must be an address such as"):
        Search(retriever=url)
