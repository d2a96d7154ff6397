"""A small server with the routes of vLLM that `VLLMServer` uses, which samples with a policy of its own.

It takes weights as a worker of vLLM does, by the same extension. Tests make it fail: each of its `faults` answers one
request for a completion.
"""

import contextlib
import copy
import functools
import http.server
import json
import socket
import threading
import time
import types
import uuid

import torch

from grail_lightning import Sampling
from grail_lightning.core.engines.hf.draw import draw, warpers
from grail_lightning.core.engines.vllm.worker import WeightReceiver
from grail_lightning.core.policy.capabilities import cache_argument
from grail_lightning.core.policy.load import load_policy

_packaged = functools.cache(functools.partial(load_policy, "arithmetic", trainable=False))


class Worker(WeightReceiver):
    """What a worker of vLLM has that the extension uses."""

    def __init__(self):
        self.policy = copy.deepcopy(_packaged())
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(dtype=torch.float32, max_model_len=1024)
        )
        sampler = types.SimpleNamespace(topk_topp_sampler=torch.nn.Identity())
        self.model_runner = types.SimpleNamespace(sampler=sampler, get_model=lambda: self.policy.model)
        self.loads, self.grail_instance = 0, uuid.uuid4().hex

    def reload_weights(self, weights_iterator):
        self.loads += 1
        state = self.policy.model.state_dict()
        for name, value in weights_iterator:
            state[name].copy_(value)

    @torch.no_grad()
    def complete(self, prompt, asked):
        """An answer with ids and log-probabilities, drawn as the parameters of the request say."""
        length = asked["max_tokens"]
        cut = {} if asked["temperature"] == 0 else {"top_p": asked["top_p"], "top_k": asked["top_k"]}
        sampling = Sampling(max_response_length=length, temperature=asked["temperature"], **cut)
        noise = torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(asked["seed"]))
        ids, logprobs, cache, reason = [], [], None, "length"
        name = cache_argument(self.policy.model)
        for place in range(length):
            given = torch.tensor([ids[-1:] or prompt])
            out = self.policy.model(given, **{name: cache}, use_cache=True)
            cache = out[name]
            token, logprob = draw(out.logits[:, -1], sampling, warpers(sampling), noise[place : place + 1])
            ids.append(int(token))
            logprobs.append(float(logprob))
            if ids[-1] in asked["stop_token_ids"]:
                reason = "stop"
                break
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}]}


def fails(status):
    """A fault: an answer with this status."""
    return lambda handler: handler.say({"error": {"message": "not now"}}, status)


def says(text, length):
    """A fault: an answer with this text, which is whole if it has this length."""

    def fault(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(text)
        handler.close_connection = True

    return fault


class Routes(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        served = self.server.served
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked = asked = json.loads(body) if body else {}
        served.asked.append((self.path, dict(self.headers), asked))
        if self.path == "/v1/completions":
            with served.lock:
                fault = served.faults.pop(0) if served.faults else None
                worker = served.worker
            if fault is not None:
                fault(self)
                return
            with served.lock:
                answer = worker.complete(asked["prompt"], asked)
            self.say(answer)
        elif time.monotonic() < served.loading:
            self.say({}, 503)
        elif self.path == "/collective_rpc" and served.refuses:
            fails(served.refuses)(self)
        elif self.path == "/collective_rpc" and served.dev_mode:
            method = getattr(served.worker, asked["method"], None)
            if method is None:
                said = f"Call to collective_rpc method failed: 'CPUWorker' object has no attribute '{asked['method']}'"
                self.say({"error": {"message": said}}, 500)
                return
            with served.lock:
                result = method(*asked.get("args", ()))
            self.say({"results": [result]})
        elif self.path.startswith("/reset_prefix_cache"):
            self.say({"success": True})
        else:
            self.say({"detail": "Not Found"}, 404)

    def say(self, value, status=200):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


class _Quiet(http.server.ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.connections = []

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def break_off(self):
        """Close every connection, as the end of a process does."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """A client that has gone is no error here."""


class SmallServer:
    """The server, as a context.

    Attributes:
        faults: What answers the next requests for completions, in place of the worker.
        asked: Path, headers and body of each POST request.
        loading: The moment at which it begins to answer.
        refuses: The status with which it refuses every question about its workers.
    """

    def __init__(self, worker=Worker, dev_mode=True, refuses=None):
        self.make, self.dev_mode = worker, dev_mode
        self.worker = worker() if worker is not None else None
        self.faults, self.asked, self.lock = [], [], threading.RLock()
        self.loading, self.refuses = 0.0, refuses
        self._http = _Quiet(("127.0.0.1", 0), Routes)
        self._http.served = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._http.shutdown()
        self._http.break_off()
        self._http.server_close()

    def restart(self):
        """Go on with a new worker, which has the weights of the checkpoint."""
        with self.lock:
            self.worker = self.make()

    def count(self, method):
        """How often a method of the worker was called."""
        return sum(asked.get("method") == method for _, _, asked in self.asked)
