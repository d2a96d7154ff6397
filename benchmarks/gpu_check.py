"""What a CUDA machine shows: correctness first, then speed and memory, a table a part.

    make gpu-check                                             # everything, under 30 minutes on one large GPU
    python benchmarks/gpu_check.py correctness                 # one part, under 9 minutes each
    python benchmarks/gpu_check.py sampling step credit --models 0.6b
    python benchmarks/gpu_check.py --device cpu                # everything in small, to see that it runs

The models have random weights in the shapes of Qwen3-0.6B and Qwen3-4B, so nothing is downloaded. Each part of each
model is a process of its own, on the first visible device: one that fails or exceeds `--limit` says so, and the
others go on.

- correctness: the tests marked `gpu`. flash-attn is tested where it is installed.
- sampling: tokens per second and peak memory of `HFEngine`, 64 responses of 512 tokens, with the cache that grows and
  with the static one (a CUDA graph a token), blocks as they are and compiled; and how far its log-probabilities are
  from the policy's own.
- methods: every credit method, control and world takes steps through the command line (same_results.py).
- step: a step of Dr. GRPO on 2 × 4 given responses of 2,048 tokens, bfloat16 weights with masters, and where its time
  goes (credit_cost.py).
- credit: the same step with GRAIL and with Dr. GRPO, at one and at four updates, in turn.
- trl: a step on 8 given responses of 2,048 tokens, and of 256 to 2,048, ours beside TRL's GRPOTrainer, in turn
  (step_vs_trl.py), bfloat16 without masters, as many rows in a micro-batch. It is skipped where TRL is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("correctness", "methods", "sampling", "step", "credit", "trl")


def command_of(part: str, model: str, options: argparse.Namespace) -> list[str]:
    """The command line of a part, whose output is its table."""
    small = options.device == "cpu"
    if part == "correctness":
        # Warnings are errors in the suite. Libraries have others on GPUs, which say nothing about results.
        quiet = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-v", "-rfs", "--tb", "short", "--no-header"]
        files = ["tests/test_gpu.py", *([] if small else ["tests/test_trees.py"])]
        return ["-m", "pytest", "--rootdir", str(ROOT), *quiet, *(str(ROOT / file) for file in files)]
    if part == "methods":
        cases = ["GRAIL", "charts"] if small else []
        return ["benchmarks/same_results.py", "record", str(Path(tempfile.gettempdir(), "gpu_check")), *cases]
    if part == "sampling":
        return ["benchmarks/gpu_check.py", "sampling", "--worker", "--models", model, "--device", options.device]
    if part == "trl":
        case = ["--case", *(["half"] if small else ["0.6b", "0.6b-uneven"]), "--device", options.device]
        length = 64 if small else 2048
        return ["benchmarks/step_vs_trl.py", *case, "--trl-rows", "4", "--budgets", str(4 * (length + 52))]
    sides = ["DrGRPO", "--updates", "1"] if part == "step" else ["DrGRPO", "GRAIL", "--updates", "1", "4"]
    case = ["--case", model, "--device", options.device, "--rounds", "2" if small else "4"]
    peak = ["--peak-tflops", str(options.peak_tflops)] if options.peak_tflops else []
    return ["benchmarks/credit_cost.py", *case, *peak, "--sides", *sides, *(["--profile"] if part == "step" else [])]


def run(part: str, model: str, options: argparse.Namespace) -> bool:
    """Run a part in a process of its own, for at most some seconds; whether it ended well."""
    print(f"\n{part}, {model}\n" if part in ("sampling", "step", "credit") else f"\n{part}\n", flush=True)
    if part == "trl" and importlib.util.find_spec("trl") is None:
        print("skipped: TRL is not installed; constraints.txt has its version", flush=True)
        return True
    begun = time.time()
    # A session of its own: the processes that the part starts are stopped with it.
    command = [sys.executable, *command_of(part, model, options)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(options.device, part), start_new_session=True)
    try:
        failure = f"exit code {code}" if (code := process.wait(timeout=options.limit)) else ""
    except subprocess.TimeoutExpired:
        failure = f"stopped after {options.limit:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failure:
        print(f"failed: {failure}", flush=True)
    print(f"{time.time() - begun:.0f} s", flush=True)
    return not failure


def environment(device: str, part: str = "") -> dict[str, str]:
    """The working tree goes before an installed package, and one device is visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    changes = {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    changes |= {"GRAIL_TEST_DEVICE": device, "HF_HUB_OFFLINE": "1"}
    if part in ("correctness", "methods"):  # With this workspace cuBLAS is deterministic.
        changes["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | changes


def sampling(model: str, device: str) -> None:
    """Print tokens per second and memory of `HFEngine`, 64 responses, a line for each way to decode."""
    import torch
    from credit_cost import StandInTask, stand_in_policy

    from grail_lightning import HFEngine, Sampling

    policy, cuda = stand_in_policy(model, device).eval(), device == "cuda"
    policy.end_token_ids = ()  # Every response has the full length.
    prompts = [StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in range(10, 18)]
    print("| method | compile | first call, s | tokens | s | tokens/s | ms a token | peak GiB | log-prob. error |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    compiled = "inductor" if cuda else "eager"
    for method, compiles in (("static", False), ("static", compiled), ("compact", False), ("compact", compiled)):
        engine = HFEngine(method=method, compile=compiles)
        engine.update_weights(policy)
        start = time.perf_counter()
        engine.generate(prompts, 8, Sampling(max_response_length=12), 0)  # Compiles, and loads kernels.
        first = time.perf_counter() - start
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        batch = engine.generate(prompts, 8, Sampling(max_response_length=512 if cuda else 16), 0)
        tokens = int(batch.response_lengths.sum())  # It waits for the device.
        seconds = time.perf_counter() - start
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if cuda else "-"
        some = batch.select(torch.arange(0, len(batch), 8, device=device))
        with torch.no_grad():
            scored = policy(policy.layout(some), decode=partial(policy.decode, compiled=False))
        error = float((scored - some.sampling_logprobs)[some.response_mask].abs().mean())
        figures = [f"{first:.1f}", tokens, f"{seconds:.2f}", f"{tokens / seconds:.0f}"]
        figures += [f"{1000 * seconds / batch.response_ids.shape[1]:.2f}", peak, f"{error:.1e}"]
        print(f"| {method} | {compiles or 'no'} | {' | '.join(map(str, figures))} |", flush=True)


def device_name(options: argparse.Namespace) -> str:
    """The name of the device. Another process asks: a context of this one would take memory of the device."""
    code = (
        "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU')"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, env=environment(options.device), text=True)
    version, _, name = said.strip().partition(" ")
    if options.device == "cuda" and name == "CPU":
        raise SystemExit("there is no CUDA device here; `--device cpu` tries every part in small")
    return f"{name}, torch {version}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, "all"], default="all", metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=["0.6b", "4b", "tiny"], help="default 0.6b, 4b; tiny on a CPU")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, of devices that are not known")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which a part of a model is stopped")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.models or (["tiny"] if options.device == "cpu" else ["0.6b", "4b"])
    if options.worker:
        return sampling(models[0], options.device)
    print(device_name(options))
    begun, good = time.time(), True
    for part in PARTS if "all" in options.parts else options.parts:
        for model in models if part in ("sampling", "step") else models[:1]:
            good &= run(part, model, options)
    print(f"\n{time.time() - begun:.0f} s in all")
    sys.exit(not good)


if __name__ == "__main__":
    main()
