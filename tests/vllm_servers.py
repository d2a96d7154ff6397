"""Real vLLM servers as processes: started, killed and started again by tests and benchmarks."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSION = "grail_lightning.core.engines.vllm.worker.WeightReceiver"
# On CPUs. One thread a process: more of them stall the client on two cores.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
# On a CPU vLLM 0.32 ends with "CPU Generator does not use offset" when the prompt of a request with a seed is cut.
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")


def python_with_vllm():
    """The interpreter that has vLLM: this one, or the one that `VLLM_PYTHON` names; None if there is none."""
    if named := os.environ.get("VLLM_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("vllm") else None


def free_port():
    """A port on which nobody listens at present."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Served:
    """A server on this machine, in a process group of its own; what it says goes to the file `log`."""

    def __init__(self, model, log, options=("--worker-extension-cls", EXTENSION), environment=None):
        self.model, self.log, self.options = str(model), Path(log), options
        self.environment = os.environ | ENVIRONMENT | (environment or {})
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        """Begin to start it."""
        command = [python_with_vllm(), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--logprobs-mode", "processed_logprobs", *WHOLE_PROMPTS, *self.options]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, cwd=ROOT, start_new_session=True
            )
        return self

    def wait(self, seconds=300):
        """Until it answers; returns the seconds it took."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-3000:]}"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return time.monotonic() - begun
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"no server after {seconds} s: {self.log.read_text()[-3000:]}")

    def kill(self):
        """End it and its workers at once."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
