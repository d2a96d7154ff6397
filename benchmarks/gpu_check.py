"""What a CUDA machine shows in one table: correctness first, then speed and memory.

    make gpu-check                                             # everything, under 25 minutes on one large GPU
    python benchmarks/gpu_check.py correctness                 # one part, under 9 minutes each
    python benchmarks/gpu_check.py sampling step credit --models 0.6b
    python benchmarks/gpu_check.py --device cpu                # everything in small, to see that it runs

It needs the working tree and, of Python packages, torch, lightning, transformers, torchmetrics, jsonargparse,
math-verify, regex, mpmath, scipy, matplotlib, jinja2, pytest and hypothesis; trl for the part of this name. flash-attn
is tested where it is installed. The models have random weights in the shapes of Qwen3-0.6B and Qwen3-4B, so nothing is
downloaded.

- correctness: the tests marked `gpu`, a row for each.
- sampling: tokens per second and peak memory of `HFEngine`, 64 responses of 512 tokens.
- step: a full step of GRPO on 2 × 4 responses of 2,048 tokens, bfloat16 weights with masters: sampling, grading and one
  update, with the seconds of each phase, the peaks of both, and MFU = 6 · parameters · tokens that were run / (seconds
  of the update · peak FLOP/s). The update trains on given responses, of which half are right, so that all rows count;
  they have their prompt alone in common. `4b` has checkpointed blocks.
- credit: the same step on given responses with GRAIL and with GRPO, at one and at four updates, in turn.
- trl: a step on 8 given responses of 2,048 tokens, ours beside TRL's GRPOTrainer, in turn (see step_vs_trl.py):
  Qwen3-0.6B, bfloat16 without masters, as many rows in a micro-batch. It is skipped where TRL is not installed.

The peak FLOP/s of dense bfloat16 products is known for common GPUs; give `--peak-tflops` for others. Each part of each
model is a process of its own, on the first visible device: one that fails or exceeds `--limit` is a row. Rows are
appended to `--out` (JSON lines), so that parts can run one by one; the table shows the last run of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = ("correctness", "sampling", "step", "credit", "trl")
ONE_MODEL = ("credit", "trl")
PART_SECONDS, WHOLE_SECONDS = 540, 1500
NEEDED = (
    "torch", "lightning", "transformers", "torchmetrics", "jsonargparse", "math_verify", "regex", "mpmath", "scipy",
    "matplotlib", "jinja2", "pytest", "hypothesis",
)  # fmt: skip


class Table:
    """The rows of all runs in a file of JSON lines, of which those of one device are shown."""

    def __init__(self, file: Path, device: str) -> None:
        self.file, self.device = file, device

    def add(self, key: dict[str, Any], what: str, measured: float | str, unit: str = "") -> None:
        """Append a row."""
        with open(self.file, "a") as file:
            entry = {"what": what, "measured": measured, "unit": unit}
            file.write(json.dumps(key | entry) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """The last figure of each name, of the last run of each part and model, in the order of the parts."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        mine = [row for row in map(json.loads, lines) if row.get("device") == self.device and "run" in row]
        last = {(row["part"], row["model"]): row["run"] for row in mine}
        found = {
            (row["part"], row["model"], row["what"], row["unit"]): row
            for row in mine
            if row["run"] == last[row["part"], row["model"]]
        }
        return sorted(found.values(), key=lambda row: PARTS.index(row["part"]))

    def show(self) -> None:
        """Print the table."""
        print("| part | what | measured |\n|---|---|--:|")
        for row in self.rows():
            print(f"| {row['part']} | {row['what']} | {figure(row['measured'], row['unit'])} |")


def figure(value: float | str | None, unit: str) -> str:
    """A figure with three digits or so, and its unit."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value.replace("|", "/")
    if unit == "%":
        return f"{value:.1%}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f} {unit}"


def run(key: dict[str, Any], options: argparse.Namespace, table: Table, seconds: float) -> bool:
    """Run a part in a process of its own, for at most some seconds; whether it ended well. A failure is a row."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_parts.py")), key["part"], "--device", options.device]
    command += ["--model", key["model"]] if key["model"] else []
    command += ["--peak-tflops", str(options.peak_tflops)] if options.peak_tflops else []
    command += ["--key", json.dumps(key), "--out", str(options.out.resolve())]
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: the processes that the part starts are stopped with it.
        process = subprocess.Popen(
            command,
            env=environment(options.device, key["part"]),
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        said = log.read()
    if code == 0:
        return True
    print(said[-4000:], file=sys.stderr, flush=True)
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    reason = (raised or lines or [f"exit code {code}"])[-1][:240]
    stopped = f"stopped: the part took more than {options.limit:g} s"
    table.add(key, "failed" if key["model"] == "" else f"{key['model']}, failed", stopped if code is None else reason)
    return False


def environment(device: str, part: str = "") -> dict[str, str]:
    """The working tree goes before an installed package, and one device is visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    changes = {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    changes |= {"GRAIL_TEST_DEVICE": device, "HF_HUB_OFFLINE": "1"}
    if part == "correctness":  # cuBLAS is deterministic with this workspace only, which it reads when it starts.
        changes["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | changes


def take_part(part: str, options: argparse.Namespace, table: Table, device: str) -> bool:
    """Run one part with each of its models and check its time; whether all went well."""
    begun, good = time.time(), True
    models = options.models or (["tiny"] if options.device == "cpu" else ["0.6b", "4b"])
    models = [""] if part == "correctness" else models[:1] if part in ONE_MODEL else models
    if part == "trl" and options.device == "cuda":
        models = ["0.6b"]
    for model in models:
        key = {"device": device, "run": begun, "part": part, "model": model}
        if part == "trl" and importlib.util.find_spec("trl") is None:
            table.add(key, "ours / TRL", f"skipped: TRL is not installed; pip install {trl_version()}")
        else:
            good &= run(key, options, table, begun + options.limit - time.time())
    seconds = time.time() - begun
    late = "" if seconds <= PART_SECONDS else f", more than {PART_SECONDS // 60} minutes"
    table.add(
        {"device": device, "run": begun, "part": part, "model": " "}, "time of this part", f"{seconds:.0f} s{late}"
    )
    print(f"{part}: {seconds:.0f} s{late}", flush=True)
    return good


def trl_version() -> str:
    """The version with which step_vs_trl.py is known to work."""
    found = re.search(r"^trl==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[0]


def check_packages(parser: argparse.ArgumentParser) -> None:
    """End with one line if something is not installed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} cannot be imported; run `pip install -c constraints.txt -e '.[dev]'`")


def device_name(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """The device and torch's version. Another process asks: a context of this one would take memory of the device."""
    code = "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(options.device), capture_output=True, text=True, check=True)
    version, _, name = done.stdout.strip().partition(" ")
    if options.device == "cuda" and not name:
        parser.error("there is no CUDA device here; `--device cpu` tries every part in small")
    return name or "CPU", version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--models", nargs="+", choices=["0.6b", "4b", "tiny"], help="default 0.6b and 4b; tiny on a CPU"
    )
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, of devices that are not known")
    parser.add_argument("--limit", type=float, default=PART_SECONDS, help="seconds after which a part is stopped")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"the parts are {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    check_packages(parser)
    device, version = device_name(options, parser)
    table, begun = Table(options.out, device), time.time()
    good = [take_part(part, options, table, device) for part in options.parts or PARTS]
    print(f"\n{device}, torch {version}\n")
    table.show()
    if options.device == "cpu":
        print("\nTiny models and sizes. Memory is not measured on a CPU here.")
    seconds = time.time() - begun
    late = "" if seconds <= WHOLE_SECONDS else f", more than {WHOLE_SECONDS // 60} minutes"
    print(f"\n{seconds:.0f} s in all{late}")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
