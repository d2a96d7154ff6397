"""The plan of a run beside the memory that it takes: real training steps on the CPU, each case in processes of its own.

    OMP_NUM_THREADS=1 python benchmarks/plan_check.py --model FOLDER

FOLDER holds a small pretrained model in Hugging Face format (SmolLM2-135M, say), for two of the cases: all weights in
float32, and adapters. The others are a random-weight Qwen3 of 34 million parameters: with checkpointed blocks, with
weights in bfloat16 beside float32 masters, and on two ranks with DDP and with FSDP2.

Each process runs two steps of the real module under the real Trainer, or three on two ranks: the engine samples, and
the update trains on as many responses of the full length, half of them right, so that every row counts and the lengths
are known. It prints the peak of resident memory of both phases in the last step, above that after all imports and a
step of the packaged policy, since torch and Lightning import and allocate more when they are first used. The parent
prints these beside the plan. glibc is set to return freed memory to the kernel at once; by default it keeps up to a
step's activations for later.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import lightning.pytorch as pl
import peft  # noqa: F401  (imported before the measurement begins)
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from stand_in import StandInEngine, StandInTask, random_qwen3
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.module import GrailModule
from grail_lightning.plan.capacity import Planner
from grail_lightning.plan.seconds import read_rates
from grail_lightning.plan.settings import Settings
from grail_lightning.plan.shapes import model_config
from grail_lightning.policy import Loading, LoRA
from grail_lightning.step.options import Execution

MIB = 2**20
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Case(NamedTuple):
    """One comparison."""

    text: str
    loading: Loading = Loading()
    length: int = 384
    strategy: str = "single"
    ranks: int = 1


CASES = {
    "pretrained": Case("pretrained, float32, all weights", length=96),
    "lora": Case("pretrained, adapters", Loading(lora=LoRA()), length=96),
    "checkpointed": Case("34 M, checkpointed blocks", Loading(gradient_checkpointing=True)),
    "masters": Case("34 M, bfloat16 with masters", Loading(dtype="bfloat16")),
    "ddp": Case("34 M, DDP on 2 ranks", strategy="ddp", ranks=2),
    "fsdp2": Case("34 M, FSDP2 on 2 ranks", strategy="fsdp2", ranks=2),
}
PROBLEM = "Compute the sum of the numbers 11, 12 and 13 and write it in a box.\n"
PROMPTS, GROUP, BUDGET = 2, 8, 1024


class Both(StandInEngine):
    """Samples for real, and then hands out responses of the full length of which half are right."""

    def __init__(self, length: int, phases: dict) -> None:
        super().__init__(length)
        self.real, self.phases = HFEngine(), phases

    def generate(self, prompts, group_size, sampling, seed):
        self.real.update_weights(self._policy)
        with peak(self.phases, "sampling"):
            self.real.generate(prompts, group_size, sampling, seed)
        return super().generate(prompts, group_size, sampling, seed)


class peak:  # noqa: N801
    """Keeps the peak of resident memory and the seconds of what runs inside, by a name."""

    def __init__(self, phases: dict, name: str) -> None:
        self.phases, self.name = phases, name

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # The kernel's peak begins anew.
        self.begun = time.perf_counter()

    def __exit__(self, *error):
        # The last of two steps is kept: the optimiser's state exists then.
        self.phases[self.name] = status("VmHWM"), time.perf_counter() - self.begun


def status(name: str) -> int:
    """Bytes of this process, by the name of the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def settings_of(case: Case, folder: str, prompt: int = 1) -> Settings:
    return Settings(
        policy=folder,
        loading=case.loading,
        sampling=Sampling(max_response_length=case.length),
        execution=Execution(group_size=GROUP, token_budget=BUDGET),
        optimizer=partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0),
        strategy=case.strategy,
        device="cpu",
        prompts_per_batch=PROMPTS * case.ranks,
        prompt_tokens=prompt,
        response_tokens=float(case.length),
    )


def measure(case: Case, folder: str) -> None:
    """Run two steps in this process and print what they took."""
    settings, phases = settings_of(case, folder), {}
    tiny = GrailModule("arithmetic", settings.sampling, engine=Both(64, {}), execution=Execution(group_size=2))
    run(tiny, case, {})
    before = resting()
    options = {"loading": settings.loading, "execution": settings.execution, "optimizer": settings.optimizer}
    engine = Both(case.length, phases)
    module = GrailModule(folder, settings.sampling, engine=engine, **options)
    run(module, case, phases)
    found = {name: (size - before, seconds) for name, (size, seconds) in phases.items()}
    longest = max(len(module.encode(prompt.messages)) for prompt in batch())
    print(json.dumps({"phases": found, "prompt": longest}))


def resting() -> int:
    """Resident bytes of this process, without those that are free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def batch() -> list:
    return [StandInTask().prompt({"problem": f"{k}. {PROBLEM}"}) for k in range(1, PROMPTS + 1)]


def run(module: GrailModule, case: Case, phases: dict) -> None:
    """Two steps with a quiet Trainer; three on two ranks, since DDP allocates its buckets anew after the first."""
    take = module.take_steps

    def taken(update):
        with peak(phases, "update"):
            return take(update)

    module.take_steps = taken
    strategies = {"single": "auto", "ddp": "ddp", "fsdp2": ModelParallelStrategy(case.ranks, 1)}
    loader = torch.utils.data.DataLoader([batch()] * (1 + case.ranks), batch_size=None)
    pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=case.ranks, strategy=strategies[case.strategy], logger=False,
        enable_checkpointing=False, barebones=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module, loader)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a small pretrained model")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None and {"pretrained", "lora"} & set(options.cases) and not options.measure:
        parser.error("the cases pretrained and lora need --model")
    torch.set_num_threads(1)
    if options.measure:
        return measure(CASES[options.measure], options.folder)
    rates = read_rates(["measured"], "cpu")
    print(f"rates measured here: {rates}")
    print("| case | phase | plan, MiB | measured, MiB | plan / measured | plan, s | measured, s |")
    print("|---|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as random:
        random_qwen3(hidden=512, layers=8, vocabulary=8192).save(random)
        for name in options.cases:
            compare(name, options.model if name in ("pretrained", "lora") else random, rates)
    return None


def compare(name: str, folder: str, rates) -> None:
    """Measure a case in processes of its own, and print its first rank beside its plan."""
    case = CASES[name]
    found = SimpleNamespace(**json.loads(printed(case, [__file__, "--measure", name, "--folder", folder])))
    settings = settings_of(case, folder, found.prompt)
    config, _ = model_config(settings)
    plan = Planner(config, rates).plan(settings, case.ranks)
    totals = {phase.name: phase.total for phase in plan.phases.values()}
    totals["update"] = max(totals["update"], totals["optimizer step"])
    for phase, (size, seconds) in found.phases.items():
        print(
            f"| {case.text} | {phase} | {totals[phase] / MIB:.0f} | {size / MIB:.0f} "
            f"| **{totals[phase] / size:.2f}** | {plan.seconds[phase]:.1f} | {seconds:.1f} |",
            flush=True,
        )


def printed(case: Case, command: list[str]) -> str:
    """The last line of the first rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        {} if case.ranks == 1 else meet | {"LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0"}
        for rank in range(case.ranks)
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, *command], env=os.environ | RETURN_FREED | rank, **pipes) for rank in ranks
    ]
    ended = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, ended, strict=True):
        if process.returncode:
            raise SystemExit(errors)
    return ended[0][0].splitlines()[-1]


if __name__ == "__main__":
    main()
