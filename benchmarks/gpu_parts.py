"""The parts of gpu_check.py, each run in a process of its own: `gpu_parts.py PART --model 0.6b --out FILE`.

A row is written to the file as soon as its figure is known, so that a part that fails or is stopped leaves what it has
found.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from gpu_setting import GIB, GROUP, Check, endless, prompts_of
from gpu_steps import credit, step
from gpu_tests import correctness
from stand_in import SHAPES
from step_vs_trl import CASES, OURS, TRL, Side, take

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine


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
