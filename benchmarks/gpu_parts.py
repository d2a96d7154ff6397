"""The parts of gpu_check.py, each run in a process of its own: `gpu_parts.py PART --model 0.6b --out FILE`.

A row is written to the file as soon as its figure is known, so that a part that fails or is stopped leaves what it has
found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from stand_in import SHAPES, StandInEngine, StandInTask, random_qwen3
from step_vs_trl import CASES, OURS, TRL, Side, take

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
        self.options, self.device = options, torch.device(options.device)
        self.small = options.device == "cpu"  # A trial on a CPU.
        name = "" if self.small else torch.cuda.get_device_name()
        known = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
        self.peak = options.peak_tflops or known  # Products in bfloat16, 10¹² operations a second.
        self.length = 64 if self.small else 2048
        self.budget = GROUP * (self.length + 52)
        self.title = f"Qwen3-{options.model}" if options.model in ("0.6b", "4b") else options.model

    def row(self, what: str, measured: float | str | None, unit: str = "") -> None:
        """Write a figure. A later one of the same name takes its place."""
        entry = {"what": what, "measured": measured, "unit": unit}
        with open(self.options.out, "a") as file:
            file.write(json.dumps(vars(self.options)["key"] | entry) + "\n")

    def policy(self) -> Policy:
        """Random weights in bfloat16 on the device; those of 4 billion parameters with checkpointed blocks."""
        with self.device:
            policy = random_qwen3(**SHAPES[self.options.model]).to(torch.bfloat16)
        policy.loading = Loading(gradient_checkpointing=self.options.model == "4b", dtype="bfloat16")
        if policy.loading.gradient_checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})
        torch.cuda.empty_cache()  # They were made in float32.
        return policy.train()

    @property
    def optimizer(self) -> partial:
        return partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0, fused=not self.small)

    def now(self) -> float:
        """Seconds, when the device has done what it was asked to do."""
        if not self.small:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def peak_of(self, found: dict[str, float], name: str) -> Iterator[None]:
        """Keep the most memory that PyTorch has allocated inside, in GiB; nothing on a CPU."""
        if self.small:
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        found[name] = max(found.get(name, 0.0), torch.cuda.max_memory_allocated() / GIB)


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
    """Hands out responses of the full length, half of them right; in the call `last` it also samples for real.

    `repeats` calls in a row get the same responses; `peaks` gets the memory of real sampling.
    """

    def __init__(self, check: Check, repeats: int, last: int | None, peaks: dict[str, float]) -> None:
        super().__init__(check.length, repeats)
        self.check, self.last, self.peaks = check, last, peaks

    def generate(self, prompts, group_size, sampling, seed):
        if self.calls == self.last:
            engine = HFEngine()
            engine.update_weights(self._policy)
            with endless(self._policy), self.check.peak_of(self.peaks, "sampling"):
                engine.generate(prompts, group_size, sampling, seed)
        return super().generate(prompts, group_size, sampling, seed)


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
        pl_module.execution = replace(pl_module.execution, updates_per_batch=updates)
        self.start = self.check.now()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seconds = self.check.now() - self.start
        output = outputs["output"]
        phases = {name: output.metrics.get(f"time/{name}", 0.0) for name in ("sample", "grade", "credit", "update")}
        tokens = int(output.batch.lengths.sum()) * (1 - output.metrics.get("shared_tokens", 0.0))
        if batch_idx >= len(self.sides):  # The first round warms up and compiles.
            self.laps[self.side].append(phases | {"step": seconds, "tokens": float(tokens)})


def train(check: Check, policy: Policy, sides: list, rounds: int, peaks: dict[str, float] | None = None) -> Laps:
    """Steps of the real module under the real Trainer; with `peaks`, the last one samples, too."""
    steps = (rounds + 1) * len(sides)
    engine = GivenEngine(check, len(sides), None if peaks is None else steps - 1, {} if peaks is None else peaks)
    module = GrailModule(
        "arithmetic", Sampling(max_response_length=check.length), engine=engine, loading=Loading(dtype="bfloat16"),
        execution=Execution(group_size=GROUP, token_budget=check.budget), optimizer=check.optimizer,
    )  # fmt: skip
    module.policy = policy
    if peaks is not None:
        take_steps = module.take_steps

        def taken(update):
            with check.peak_of(peaks, "update"):
                return take_steps(update)

        module.take_steps = taken
    laps = Laps(check, sides)
    loader = torch.utils.data.DataLoader([prompts_of(2)] * steps, batch_size=None)
    pl.Trainer(
        max_epochs=1, accelerator="cpu" if check.small else "gpu", devices=1, logger=False, callbacks=[laps],
        precision="bf16-true", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    return laps


def step(check: Check) -> None:
    """A full step of GRPO: sampling, grading and one update, with its phases, memory and MFU."""
    policy = check.policy()
    size = sum(p.numel() for p in policy.parameters())
    phases = ("sample", "grade", "credit", "update", "whole step")
    what = f"{check.title} ({size / 1e9:.2g} B), {2 * GROUP} x {check.length} tokens"
    check.row(f"{what}, prefix trees by", policy.tree_kernel or "none: every row is run apart")
    peaks: dict[str, float] = {}
    (laps,) = train(check, policy, [("GRPO", 1)], 2 if check.small else 4, peaks).laps.values()
    found = {name: statistics.median(lap[name] for lap in laps) for name in ("grade", "credit", "update", "tokens")}
    found |= {"sample": laps[-1]["sample"], "whole step": laps[-1]["step"]}
    for name in phases:
        check.row(f"{what}, {name}", found[name], "s")
    for name in ("sampling", "update"):
        check.row(f"{what}, peak of {name}", peaks.get(name), "GiB")
    check.row(f"{what}, update", found["tokens"] / found["update"], "tokens/s")
    if check.peak:
        flops = 6 * size * found["tokens"] / (check.peak * 1e12)
        check.row(f"{what}, MFU of the update", flops / found["update"], "%")


def credit(check: Check) -> None:
    """GRAIL over GRPO, in turn."""
    sides = [(name, updates) for updates in (1, 4) for name in ("GRPO", "GRAIL")]
    policy = check.policy()
    laps = train(check, policy, sides, rounds=2 if check.small else 3).laps
    for updates in (1, 4):
        pairs = zip(laps["GRAIL", updates], laps["GRPO", updates], strict=True)
        ratio = statistics.median(ours["step"] / base["step"] for ours, base in pairs)
        check.row(f"{check.title}, GRAIL / GRPO, updates {updates}, without sampling", ratio, "x")


class Outcomes:
    """A plugin of pytest that writes a row for each test function."""

    def __init__(self, check: Any) -> None:
        self.check = check
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name, _, case = report.nodeid.rpartition("::")[2].removeprefix("test_").partition("[")
        self.counts[name][report.outcome] += 1
        if report.outcome != "passed":
            reason = _reason(report)
            self.reasons[name].append(f"{case.rstrip(']')}: {reason}" if case and report.failed else reason)
        counted = ", ".join(f"{number} {outcome}" for outcome, number in self.counts[name].items())
        reasons = "; ".join(dict.fromkeys(self.reasons[name]))
        self.check.row(name.replace("_", " "), f"{counted} ({reasons})" if reasons else counted)


def _reason(report: Any) -> str:
    """One line, of at most 160 characters."""
    if report.skipped:
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    return " ".join(lines[0].split())[:160] if lines else "no message"


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
    policy, prompts = check.policy().eval(), prompts_of(8)
    length = 16 if check.small else 512
    what = f"{check.title}, 64 x {length} tokens"
    tokens = 64 * length
    engine, peaks = HFEngine(), {}
    engine.update_weights(policy)
    with endless(policy), check.peak_of(peaks, "sampling"):
        engine.generate(prompts[:1], 2, Sampling(max_response_length=4), 0)  # Warm up.
        start = check.now()
        batch = engine.generate(prompts, 8, Sampling(max_response_length=length), 0)
        found = check.now() - start
    assert int(batch.response_lengths.sum()) == tokens
    check.row(what, tokens / found, "tokens/s")
    check.row(f"{what}, time", found, "s")
    check.row(f"{what}, peak", peaks.get("sampling"), "GiB")


def trl(check: Check) -> None:
    """A step on given responses, ours over TRL's, in turn. Both processes share the device."""
    case = replace(CASES["half" if check.small else "0.6b"], device=check.device.type)
    room = check.small or torch.cuda.get_device_properties(0).total_memory > 70 * GIB
    rows = GROUP if room else 1
    budget = rows * (case.limit + 52)
    sides = [Side(OURS, budget), Side(TRL, rows)]
    laps = take(case, sides, rounds=3 if check.small else 7, warm_up=2, dead=0.0)
    ours, theirs = laps.values()
    text = f"{check.title}, {case.rows} x {case.limit} given tokens, {rows} rows a micro-batch"
    for side, mine in zip(("ours", "TRL"), laps.values(), strict=True):
        check.row(f"{text}, {side}", statistics.median(lap["step"] for lap in mine), "s")
        peak = None if check.small else max(lap["peak"] for lap in mine) / 1024
        check.row(f"{text}, {side}, peak", peak, "GiB")
    ratio = statistics.median(a["step"] / b["step"] for a, b in zip(ours, theirs, strict=True))
    check.row(f"{text}, ours / TRL", ratio, "x")
    if not check.small:
        peak = max(lap["peak"] for lap in ours) / max(lap["peak"] for lap in theirs)
        check.row(f"{text}, ours / TRL, peak", peak, "x")


PARTS = {"correctness": correctness, "sampling": sampling, "step": step, "credit": credit, "trl": trl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--key", type=json.loads, default={}, help="what each row begins with, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    PARTS[options.part](Check(options))


if __name__ == "__main__":
    main()
