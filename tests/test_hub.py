"""Names of the hub without the hub: an answer in seconds, from servers of this machine that behave as a network may."""

import http.server
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from grail_lightning.policy.options import read_config, resolve_policy
from grail_lightning.runtime.hub import hub_or_cache, unreachable
from tests.shell import SHORT, fails

SECONDS = 5


class Refuses(http.server.BaseHTTPRequestHandler):
    """The hub, which knows no repository."""

    def do_HEAD(self):
        self.send_response(404 if "/resolve/" in self.path else 200)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()

    def log_message(self, *_):
        pass


@pytest.fixture
def online(monkeypatch):
    """A function that makes an address the hub's, as if the tests were not offline."""

    def at(port):
        address = f"http://127.0.0.1:{port}"
        # Transformers and huggingface_hub read the one, and what they have derived from it the others.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        return address

    return at


@pytest.fixture
def closed():
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


@pytest.mark.parametrize(("what", "name"), [("policy", "gpt7"), ("dataset", "nobody/nothing")])
def test_a_name_is_answered_in_seconds_where_there_is_no_network(
    what, name, closed, online, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    online(closed)
    options = [f"--model.policy={name}"] if what == "policy" else ["--data=MathData", f"--data.train={name}"]
    began = time.monotonic()
    said = fails(capsys, "fit", *SHORT, *options)
    assert time.monotonic() - began < SECONDS
    assert f"{name!r}" in said
    assert "the hub cannot be reached ([Errno 111] Connection refused)" in said
    assert not constants.HF_HUB_OFFLINE, "as it was"
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_asked(online):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        online(server.server_port)
        assert unreachable() == ""
        with hub_or_cache() as reason:
            assert reason == ""
            assert not constants.HF_HUB_OFFLINE
        with pytest.raises(ValueError, match=r"`policy` 'nobody/nothing' cannot be loaded: .*valid model identifier"):
            read_config("nobody/nothing")
    finally:
        server.shutdown()
        server.server_close()


def test_without_the_hub_its_cache_is_used(closed, online, tmp_path, monkeypatch):
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    config = Path(resolve_policy("arithmetic"), "config.json")
    shutil.copy(config, folder / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    online(closed)
    began = time.monotonic()
    wanted = json.loads(config.read_text())["hidden_size"]
    assert read_config("owner/name").hidden_size == wanted
    assert time.monotonic() - began < SECONDS
