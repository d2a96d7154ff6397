"""What a CUDA machine shows in one table: correctness first, then the speed and memory of sampling and of full steps.

    make gpu-check                                             # everything, under 25 minutes on one large GPU
    python benchmarks/gpu_check.py correctness                 # one part, under 9 minutes each
    python benchmarks/gpu_check.py sampling step credit --models 0.6b
    python benchmarks/gpu_check.py --device cpu                # everything in small, to see that it runs

It needs the working tree, torch, lightning, transformers and pytest; flash-attn is tested where it is installed. The
models have random weights in the shapes of Qwen3-0.6B and Qwen3-4B, so nothing is downloaded.

- correctness: the tests marked `gpu`, in a process of their own.
- sampling: tokens per second of `HFEngine`, 64 responses.
- step: one training step on eight given responses of 2,048 tokens in two groups, bfloat16 weights with masters:
  seconds, phases, peak memory, and MFU = 6 · parameters · tokens that were run / (seconds · peak FLOP/s). `4b` has
  checkpointed blocks. Random responses have their prompt alone in common.
- credit: the same step with GRAIL and with GRPO, at one and at four updates, in turn.

The peak FLOP/s of dense bfloat16 products is known for common GPUs; give `--peak-tflops` for others. Each part appends
its rows to `--out` (JSON lines), so that parts can run one by one; the table is printed from all of them at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from stand_in import StandInEngine, StandInTask, random_qwen3

from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL, Uniform
from grail_lightning.engines import HFEngine
from grail_lightning.module import GrailModule
from grail_lightning.policy import Loading, Policy
from grail_lightning.step.options import Execution

ROOT = Path(__file__).parents[1]
PARTS = ("correctness", "sampling", "step", "credit")
SHAPES = {
    "0.6b": {"hidden": 1024, "layers": 28, "vocabulary": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True},
    "4b": {"hidden": 2560, "layers": 36, "vocabulary": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "intermediate_size": 9728, "tie_word_embeddings": True},
    "tiny": {"hidden": 128, "layers": 2, "vocabulary": 2048, "tie_word_embeddings": True},
}  # fmt: skip
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "4090": 165, "B200": 2250}


class Check:
    """The options of a run and the rows of its table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.small = self.device.type == "cpu"
        name = torch.cuda.get_device_name() if not self.small else "CPU"
        known = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
        self.device_name, self.peak = name, options.peak_tflops or known

    def row(self, part: str, what: str, value: str) -> None:
        """Print a figure and keep it."""
        print(f"{part}: {what}: {value}", flush=True)
        with open(self.options.out, "a") as file:
            file.write(json.dumps({"device": self.device_name, "part": part, "what": what, "value": value}) + "\n")

    def policy(self, model: str) -> Policy:
        """Random weights in bfloat16 on the device (float32 on a CPU)."""
        with self.device:
            policy = random_qwen3(**SHAPES[model])
        policy.loading = Loading(gradient_checkpointing=model == "4b", dtype="float32" if self.small else "bfloat16")
        policy.to(torch.float32 if self.small else torch.bfloat16)
        if model == "4b":
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return policy.train()

    def synchronise(self) -> None:
        """Wait for the device."""
        if not self.small:
            torch.cuda.synchronize()


def correctness(check: Check) -> None:
    """The tests marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    command += [] if check.small else ["tests/test_trees.py"]
    environment = os.environ | {"GRAIL_TEST_DEVICE": check.device.type}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    check.row("correctness", "tests marked gpu", lines[-1].strip("= ") if lines else done.stderr[-300:])
    for line in lines:
        if found := re.match(r"(FAILED|ERROR|SKIPPED) (.*)", line):
            check.row("correctness", found[1].lower(), found[2][:160])


def sampling(check: Check, model: str) -> None:
    """Tokens per second of `HFEngine`."""
    policy = check.policy(model).eval()
    engine = HFEngine()
    engine.update_weights(policy)
    policy.end_token_ids = ()  # Every response has the full length.
    length = 16 if check.small else 512
    prompts = [StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in range(10, 18)]
    options = Sampling(max_response_length=length)
    with torch.no_grad():
        engine.generate(prompts[:1], 2, Sampling(max_response_length=4), 0)  # Warm up.
        check.synchronise()
        start = time.perf_counter()
        batch = engine.generate(prompts, 8, options, 0)
        check.synchronise()
    seconds = time.perf_counter() - start
    tokens = int(batch.response_lengths.sum())
    check.row(
        "sampling",
        f"Qwen3-{model}, 64 responses of {length} tokens",
        f"{tokens / seconds:,.0f} tokens/s ({seconds:.1f} s)",
    )


class Laps(pl.Callback):
    """Seconds, phases and tokens of each step, and the sides of a comparison in turn."""

    def __init__(self, check: Check, sides: list[tuple[str, int]]) -> None:
        self.check, self.sides = check, sides
        self.laps: dict[tuple[str, int], list[dict[str, float]]] = {side: [] for side in sides}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        turn, place = divmod(batch_idx, len(self.sides))
        self.side = self.sides[(turn + place) % len(self.sides)]
        name, updates = self.side
        pl_module.credit = GRAIL() if name == "GRAIL" else Uniform()
        pl_module.execution = Execution(
            group_size=4, updates_per_batch=updates, token_budget=pl_module.execution.token_budget
        )
        self.check.synchronise()
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.check.synchronise()
        seconds = time.perf_counter() - self.start
        output = outputs["output"]
        lap = {k.removeprefix("time/"): v for k, v in output.metrics.items() if k.startswith("time/")}
        tokens = int(output.batch.lengths.sum()) * (1 - output.metrics.get("shared_tokens", 0.0))
        if batch_idx >= len(self.sides):  # The first round warms up and compiles.
            self.laps[self.side].append(lap | {"step": seconds, "tokens": float(tokens)})


def train(check: Check, model: str, sides: list[tuple[str, int]], rounds: int) -> tuple[Laps, float, int]:
    """Steps on given responses; returns their laps, the peak memory in GiB, and the number of parameters."""
    length = 64 if check.small else 2048
    budget = 256 if check.small else 4 * 2100

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=not check.small)

    module = GrailModule(
        "arithmetic", Sampling(max_response_length=length), engine=StandInEngine(length // 2, len(sides)),
        execution=Execution(group_size=4, token_budget=budget), optimizer=optimizer,
        loading=Loading(dtype="float32" if check.small else "bfloat16"),
    )  # fmt: skip
    module.policy = check.policy(model)
    size = sum(p.numel() for p in module.policy.parameters())
    laps = Laps(check, sides)
    task = StandInTask()
    batch = [task.prompt({"problem": f"{k}+{k}\n"}) for k in (11, 12)]
    loader = torch.utils.data.DataLoader([batch] * ((rounds + 1) * len(sides)), batch_size=None)
    if not check.small:
        torch.cuda.reset_peak_memory_stats()
    pl.Trainer(
        max_epochs=1, accelerator="cpu" if check.small else "gpu", devices=1, logger=False, callbacks=[laps],
        precision="32-true" if check.small else "bf16-true", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    peak = 0.0 if check.small else torch.cuda.max_memory_allocated() / 2**30
    return laps, peak, size


def step(check: Check, model: str) -> None:
    """A full step of GRPO without sampling."""
    laps, peak, size = train(check, model, [("GRPO", 1)], rounds=2 if check.small else 4)
    found = laps.laps["GRPO", 1]
    median = {name: statistics.median(lap[name] for lap in found) for name in found[0]}
    phases = ", ".join(f"{name} {median[name]:.2f}" for name in ("grade", "credit", "update"))
    value = f"{median['step']:.2f} s ({phases}), {median['tokens'] / median['step']:,.0f} tokens/s"
    if check.peak:
        mfu = 6 * size * median["tokens"] / median["update"] / (check.peak * 1e12)
        value += f", MFU of the update {mfu:.0%}"
    value += f", peak {peak:.1f} GiB" if peak else ""
    check.row("step", f"Qwen3-{model} ({size / 1e9:.2f} B), GRPO", value)


def credit(check: Check, model: str) -> None:
    """GRAIL over GRPO, in turn."""
    sides = [(name, updates) for updates in (1, 4) for name in ("GRPO", "GRAIL")]
    laps, _, _ = train(check, model, sides, rounds=2 if check.small else 3)
    for updates in (1, 4):
        pairs = zip(laps.laps["GRAIL", updates], laps.laps["GRPO", updates], strict=True)
        ratio = statistics.median(ours["step"] / base["step"] for ours, base in pairs)
        check.row("credit", f"Qwen3-{model}, GRAIL / GRPO, updates {updates}, without sampling", f"{ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="correctness, sampling, step, credit; default all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), help="default 0.6b and 4b; tiny on a CPU")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, of devices that are not known")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"the parts are {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; `--device cpu` tries every part in small")
    check = Check(options)
    models = options.models or (["tiny"] if check.small else ["0.6b", "4b"])
    for part in options.parts or PARTS:
        start = time.perf_counter()
        if part == "correctness":
            correctness(check)
        else:
            for model in models if part != "credit" else models[:1]:
                {"sampling": sampling, "step": step, "credit": credit}[part](check, model)
                if not check.small:
                    torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    print(f"\n{check.device_name}, torch {torch.__version__}\n\n| part | what | figure |\n|---|---|---|")
    several = ("failed", "error", "skipped")  # Of other figures the newest counts.
    latest = {(r["part"], r["what"], r["value"] if r["what"] in several else ""): r for r in rows}
    for entry in [r for r in latest.values() if r["device"] == check.device_name]:
        print(f"| {entry['part']} | {entry['what']} | {entry['value']} |")


if __name__ == "__main__":
    main()
