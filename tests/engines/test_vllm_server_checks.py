"""What `VLLMServer` finds out about its servers and its options before a model is loaded."""

import re
import time

import pytest

from grail_lightning.engines import VLLMServer
from grail_lightning.policy import Loading
from tests.shell import SHORT, fails
from tests.vllm_routes import SmallServer, Worker


def check(servers, **options):
    engine = VLLMServer([server.url for server in servers], **options)
    try:
        engine.check("arithmetic", Loading())
    finally:
        engine.close()


def test_servers_with_the_policys_model_pass_the_check():
    with SmallServer() as one, SmallServer() as other:
        check([one, other])
        assert [server.count("grail_status") for server in (one, other)] == [1, 1]


class Other(Worker):
    """A worker that serves a model of another shape."""

    def grail_status(self):
        return super().grail_status() | {"vocab_size": 999, "model": "another"}


class OtherRelease(Worker):
    """A worker with the extension of another release."""

    def grail_status(self):
        return super().grail_status() | {"protocol": 0}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            {"worker": Other},
            "must serve the policy's model, with vocab_size .*, but it serves another with vocab_size 999",
        ),
        ({"worker": OtherRelease}, "has the worker extension of another release of grail-lightning"),
        ({"worker": lambda: Worker(logprobs_mode="raw_logprobs")}, "`logprobs_mode` is raw_logprobs. Start it again: "),
        ({"worker": None}, "was started without --worker-extension-cls. Start it again: VLLM_SERVER_DEV_MODE=1"),
        ({"dev_mode": False}, "was started without VLLM_SERVER_DEV_MODE=1. Start it again: "),
        ({"release": "0.11.2"}, "needs vLLM from 0.32 .* but got 0.11.2. Install it there"),
    ],
)
def test_a_server_from_which_a_run_cannot_sample_is_named_with_what_to_do(server, message):
    with SmallServer(**server) as made, pytest.raises(ValueError, match=message) as raised:
        check([made])
    assert made.url in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "`urls` must be a list of at least one address"),
        ({"urls": ["http://h:1", "http://h:1/"]}, "`urls` must hold each address once"),
        ({"urls": ["http://h:1"], "patience_seconds": -1}, "`patience_seconds` must be at least 0, but got -1"),
        ({"urls": ["http://h:1"], "requests_at_once": 0}, "`requests_at_once` must be at least 1, but got 0"),
        ({"urls": ["http://h:1"], "push_folder": "/nowhere"}, "`push_folder` must be a folder, but got '/nowhere'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        VLLMServer(**options)


def test_on_the_command_line_a_missing_server_is_one_line_before_the_model_is_loaded(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "grail_lightning.distributed.sharding.load_policy", lambda *_, **__: pytest.fail("a model was loaded")
    )
    with SmallServer(worker=None) as server:
        url = server.url
    folder = f"--trainer.default_root_dir={tmp_path}"
    said = fails(capsys, "fit", *SHORT, folder, "--model.engine=VLLMServer", f"--model.engine.urls=[{url}]")
    assert f"{url} must be a vLLM server, but does not answer (Connection refused)" in said
    assert re.search(r"Start it: VLLM_SERVER_DEV_MODE=1 vllm serve /\S+/arithmetic --port \d+ --dtype auto ", said)


def test_a_run_waits_for_servers_that_are_still_loading_if_it_is_told_to():
    with SmallServer() as server:
        server.loading = time.monotonic() + 1.5
        with pytest.raises(ValueError, match=r"does not answer \(status 503"):
            check([server])
        check([server], wait_seconds=30)
        assert time.monotonic() > server.loading
