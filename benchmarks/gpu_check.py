"""What a CUDA machine shows in one table: correctness first, then speed and memory.

    make gpu-check                                             # everything, under 25 minutes on one large GPU
    python benchmarks/gpu_check.py correctness                 # one part, under 9 minutes each
    python benchmarks/gpu_check.py sampling step credit --models 0.6b
    python benchmarks/gpu_check.py --device cpu                # everything in small, to see that it runs

The models have random weights in the shapes of Qwen3-0.6B and Qwen3-4B, so nothing is downloaded. TRL is needed for the
part of this name; flash-attn is tested where it is installed.

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
model is a process of its own, on the first visible device: one that fails or exceeds `--limit` is a row. Each has its
own file of rows (JSON lines) in `--out`, so that parts can run one by one; the table shows the last run of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from credit_cost import SHAPES, StandInEngine, StandInTask, random_qwen3
from step_vs_trl import CASES, TRL, Side, take_turns

from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL, Uniform
from grail_lightning.engines import HFEngine
from grail_lightning.module import GrailModule
from grail_lightning.policy import Loading, Policy
from grail_lightning.step.options import Execution

ROOT = Path(__file__).parents[1]
GIB = 2**30
GROUP = 4
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "4090": 165, "B200": 2250}


class Check:
    """The options of a part, and the rows that it writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.model, self.file = torch.device(options.device), options.models[0], options.out
        self.small = options.device == "cpu"  # A trial on a CPU.
        name = "" if self.small else torch.cuda.get_device_name()
        known = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
        self.peak = options.peak_tflops or known  # Products in bfloat16, 10¹² operations a second.
        self.length = 64 if self.small else 2048
        self.budget = GROUP * (self.length + 52)
        self.title = f"Qwen3-{self.model}" if self.model in ("0.6b", "4b") else self.model

    def row(self, what: str, measured: float | str | None, unit: str = "") -> None:
        """Write a figure as soon as it is known. A later one of the same name takes its place."""
        add_row(self.file, what, measured, unit)

    def policy(self) -> Policy:
        """Random weights in bfloat16 on the device; those of 4 billion parameters with checkpointed blocks."""
        with self.device:
            policy = random_qwen3(**SHAPES[self.model]).to(torch.bfloat16)
        policy.loading = Loading(gradient_checkpointing=self.model == "4b", dtype="bfloat16")
        if policy.loading.gradient_checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})
        torch.cuda.empty_cache()  # They were made in float32.
        return policy.train()

    def now(self) -> float:
        """Seconds, when the device has done what it was asked to do."""
        if not self.small:
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        if not self.small:
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> float | None:
        """The most memory that PyTorch has allocated since then, in GiB; None on a CPU."""
        return None if self.small else torch.cuda.max_memory_allocated() / GIB


def prompts_of(number: int) -> list:
    return [StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in range(10, 10 + number)]


@contextmanager
def endless(policy: Policy) -> Iterator[None]:
    """Inside the context every response has the full length."""
    ends, policy.end_token_ids = policy.end_token_ids, ()
    try:
        yield
    finally:
        policy.end_token_ids = ends


class GivenEngine(StandInEngine):
    """Hands out responses of the full length, half of them right; in the call `last` it also samples for real."""

    def __init__(self, check: Check, repeats: int, last: int | None) -> None:
        super().__init__(check.length, repeats)
        self.check, self.last = check, last
        self.peak: float | None = None  # The memory of real sampling.

    def generate(self, prompts, group_size, sampling, seed):
        if self.calls == self.last:
            engine = HFEngine()
            engine.update_weights(self._policy)
            self.check.forget_peak()
            with endless(self._policy):
                engine.generate(prompts, group_size, sampling, seed)
            self.peak = self.check.peak_memory()
        return super().generate(prompts, group_size, sampling, seed)


class Laps(pl.Callback):
    """Seconds, phases, tokens and peak memory of each step, and the sides of a comparison in turn."""

    def __init__(self, check: Check, sides: list[tuple[str, int]]) -> None:
        self.check, self.sides = check, sides
        self.laps: dict[tuple[str, int], list[dict[str, Any]]] = {side: [] for side in sides}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        turn, place = divmod(batch_idx, len(self.sides))
        self.side = self.sides[(turn + place) % len(self.sides)]
        name, updates = self.side
        pl_module.credit = GRAIL() if name == "GRAIL" else Uniform()
        pl_module.execution = replace(pl_module.execution, updates_per_batch=updates)
        self.check.forget_peak()
        self.start = self.check.now()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seconds = self.check.now() - self.start
        output = outputs["output"]
        phases = {name: output.metrics.get(f"time/{name}", 0.0) for name in ("sample", "grade", "credit", "update")}
        tokens = int(output.batch.lengths.sum()) * (1 - output.metrics.get("shared_tokens", 0.0))
        if batch_idx >= len(self.sides):  # The first round warms up and compiles.
            peak = self.check.peak_memory()
            self.laps[self.side].append(phases | {"step": seconds, "tokens": float(tokens), "peak": peak})


def train(check: Check, sides: list, rounds: int, engine: GivenEngine, policy: Policy) -> Laps:
    """Steps of the real module under the real Trainer."""
    module = GrailModule(
        "arithmetic", Sampling(max_response_length=check.length), engine=engine, loading=Loading(dtype="bfloat16"),
        execution=Execution(group_size=GROUP, token_budget=check.budget),
        optimizer=partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0, fused=not check.small),
    )  # fmt: skip
    module.policy = policy
    laps = Laps(check, sides)
    loader = torch.utils.data.DataLoader([prompts_of(2)] * (rounds + 1) * len(sides), batch_size=None)
    pl.Trainer(
        max_epochs=1, accelerator="cpu" if check.small else "gpu", devices=1, logger=False, callbacks=[laps],
        precision="bf16-true", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    return laps


def step(check: Check) -> None:
    """A full step of GRPO: sampling, grading and one update, with its phases, memory and MFU."""
    policy = check.policy()
    size = sum(p.numel() for p in policy.parameters())
    what = f"{check.title} ({size / 1e9:.2g} B), {2 * GROUP} x {check.length} tokens"
    check.row(f"{what}, prefix trees by", policy.tree_kernel or "none: every row is run apart")
    rounds = 2 if check.small else 4
    engine = GivenEngine(check, repeats=1, last=rounds)
    (laps,) = train(check, [("GRPO", 1)], rounds, engine, policy).laps.values()
    medians = {name: statistics.median(lap[name] for lap in laps) for name in ("grade", "credit", "update", "tokens")}
    seconds = medians | {"sample": laps[-1]["sample"], "whole step": laps[-1]["step"]}
    for name in ("sample", "grade", "credit", "update", "whole step"):
        check.row(f"{what}, {name}", seconds[name], "s")
    check.row(f"{what}, peak of sampling", engine.peak, "GiB")
    # The engine hands out responses in the steps before the last one, so that their peak is that of the update.
    check.row(f"{what}, peak of update", None if check.small else max(lap["peak"] for lap in laps[:-1]), "GiB")
    check.row(f"{what}, update", medians["tokens"] / medians["update"], "tokens/s")
    if check.peak:
        flops = 6 * size * medians["tokens"] / (check.peak * 1e12)
        check.row(f"{what}, MFU of the update", flops / medians["update"], "%")


def credit(check: Check) -> None:
    """GRAIL over GRPO, in turn."""
    sides = [(name, updates) for updates in (1, 4) for name in ("GRPO", "GRAIL")]
    engine = GivenEngine(check, len(sides), last=None)
    laps = train(check, sides, 2 if check.small else 3, engine, check.policy()).laps
    for updates in (1, 4):
        pairs = zip(laps["GRAIL", updates], laps["GRPO", updates], strict=True)
        ratio = statistics.median(ours["step"] / base["step"] for ours, base in pairs)
        check.row(f"{check.title}, GRAIL / GRPO, updates {updates}, without sampling", ratio, "x")


class Outcomes:
    """A plugin of pytest that writes a row for each test."""

    def __init__(self, check: Any) -> None:
        self.check = check

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
            said = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.longreprtext
            reason = " ".join(said.strip().splitlines()[-1].split())[:160] if said else ""
            self.check.row(name, f"{report.outcome} ({reason})" if reason else report.outcome)


def correctness(check: Any) -> None:
    """Run the tests; a SystemExit if one fails."""
    sys.path.insert(0, str(ROOT))  # The tests import one another as `tests.NAME`.
    files = ["tests/test_gpu.py"] if check.small else ["tests/test_gpu.py", "tests/test_trees.py"]
    # Warnings are errors in the suite. Libraries have others on GPUs, which say nothing about results.
    options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "--tb", "short"]
    code = pytest.main([*options, *(str(ROOT / file) for file in files)], plugins=[Outcomes(check)])
    if code:
        raise SystemExit(f"pytest ended with {code!r}")


def sampling(check: Check) -> None:
    """Tokens per second and memory of `HFEngine`, 64 responses."""
    policy, prompts, engine = check.policy().eval(), prompts_of(8), HFEngine()
    length = 16 if check.small else 512
    what, tokens = f"{check.title}, 64 x {length} tokens", 64 * length
    engine.update_weights(policy)
    check.forget_peak()
    with endless(policy):
        engine.generate(prompts[:1], 2, Sampling(max_response_length=4), 0)  # Warm up.
        start = check.now()
        batch = engine.generate(prompts, 8, Sampling(max_response_length=length), 0)
        seconds = check.now() - start
    assert int(batch.response_lengths.sum()) == tokens
    check.row(what, tokens / seconds, "tokens/s")
    check.row(f"{what}, time", seconds, "s")
    check.row(f"{what}, peak", check.peak_memory(), "GiB")


def trl(check: Check) -> None:
    """A step on given responses, ours over TRL's, in turn. Both processes share the device."""
    case = replace(CASES["half" if check.small else "0.6b"], device=check.device.type)
    room = check.small or torch.cuda.get_device_properties(0).total_memory > 70 * GIB
    rows = GROUP if room else 1
    sides = [Side("ours", rows * (case.limit + 52)), Side(TRL, rows)]
    laps = take_turns(case, sides, rounds=3 if check.small else 7, warm_up=2)
    ours, theirs = laps.values()
    text = f"{case.name}, {case.rows} x {case.limit} given tokens, {rows} rows a micro-batch"
    for side, mine in (("ours", ours), ("TRL", theirs)):
        check.row(f"{text}, {side}", statistics.median(lap["step"] for lap in mine), "s")
        check.row(f"{text}, {side}, peak", None if check.small else max(lap["peak"] for lap in mine) / 1024, "GiB")
    ratio = statistics.median(a["step"] / b["step"] for a, b in zip(ours, theirs, strict=True))
    check.row(f"{text}, ours / TRL", ratio, "x")


PARTS = {"correctness": correctness, "sampling": sampling, "step": step, "credit": credit, "trl": trl}


# --- the driver -------------------------------------------------------------------------------------------------------


def add_row(file: Path, what: str, measured: float | str | None, unit: str = "") -> None:
    """Append a row to a file."""
    with open(file, "a") as lines:
        lines.write(json.dumps([what, unit, measured]) + "\n")


def show(folder: Path) -> None:
    """Print the table of all parts that have run."""
    print("| part | what | measured |\n|---|---|--:|")
    for part in PARTS:
        for file in sorted(folder.glob(f"{part}*.jsonl")):
            rows = {(what, unit): measured for what, unit, measured in map(json.loads, file.read_text().splitlines())}
            for (what, unit), measured in rows.items():
                print(f"| {part} | {what} | {figure(measured, unit)} |")


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


def run(part: str, model: str, file: Path, options: argparse.Namespace) -> bool:
    """Run a part in a process of its own, for at most some seconds; whether it ended well. A failure is a row."""
    file.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__)), part, "--device", options.device, "--models", model]
    command += ["--worker", "--out", str(file.resolve())]
    command += ["--peak-tflops", str(options.peak_tflops)] if options.peak_tflops else []
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: the processes that the part starts are stopped with it.
        quiet: dict[str, Any] = {"stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command, env=environment(options.device, part), **quiet)
        try:
            code: int | None = process.wait(timeout=options.limit)
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
    add_row(file, f"{model}, failed", f"stopped after {options.limit:g} s" if code is None else reason)
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


def take_part(part: str, options: argparse.Namespace, folder: Path) -> bool:
    """Run one part with each of its models; whether all went well."""
    begun, good = time.time(), True
    models = options.models or (["tiny"] if options.device == "cpu" else ["0.6b", "4b"])
    models = models if part in ("sampling", "step") else models[:1]
    for model in models:
        file = folder / f"{part}_{model}.jsonl"
        if part == "trl" and importlib.util.find_spec("trl") is None:
            file.write_text("")
            add_row(file, "ours / TRL", "skipped: TRL is not installed; constraints.txt names its version")
        else:
            good &= run(part, model, file, options)
    add_row(file, "time of this part", time.time() - begun, "s")
    print(f"{part}: {time.time() - begun:.0f} s", flush=True)
    return good


def device_name(options: argparse.Namespace) -> str:
    """The name of the device. Another process asks: a context of this one would take memory of the device."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(options.device), capture_output=True, text=True, check=True)
    if options.device == "cuda" and not done.stdout.strip():
        raise SystemExit("there is no CUDA device here; `--device cpu` tries every part in small")
    return done.stdout.strip() or "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "all"], default="all", metavar="PART", help=f"{[*PARTS]}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=["0.6b", "4b", "tiny"], help="default 0.6b, 4b; tiny on a CPU")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, of devices that are not known")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which a part of a model is stopped")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="the folder of the rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return PARTS[options.parts[0]](Check(options))
    device, begun = device_name(options), time.time()
    folder = options.out / device.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    good = [take_part(part, options, folder) for part in (PARTS if "all" in options.parts else options.parts)]
    print(f"\n{device}, torch {torch.__version__}\n")
    show(folder)
    print(f"\n{time.time() - begun:.0f} s in all" + "; tiny models, no memory of a GPU" * (options.device == "cpu"))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
