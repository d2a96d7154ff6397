# ruff: noqa: E402
"""Final weights after a few optimiser steps of the quickstart's setting, to compare two versions of the package.

    python benchmarks/same_results.py record FILE [CASE ...]        # on the earlier commit
    python benchmarks/same_results.py compare FILE [CASE ...]       # on the later one: bit for bit, or how far apart

Each case trains the packaged policy for 12 optimiser steps, in a separate process; `ddp` and `fsdp2` on two. Rows are
run whole (`--share` runs common prefixes once), so that versions with different sharing can be compared.
Both versions must run on the same machine: other processors round differently.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file, save_file

import grail_lightning.credit as methods
from grail_lightning import ArithmeticData, GrailModule
from grail_lightning.policy import Loading, LoRA
from grail_lightning.runtime.collectives import whole_tensor

try:  # Versions before there were two groups of options.
    from grail_lightning.objective import Objective
    from grail_lightning.rollout import Sampling

    Execution = None
except ImportError:
    from grail_lightning.batch import Sampling
    from grail_lightning.step.options import Execution, Objective

STEPS = 12
CASES = {
    "grpo": {},
    "grail": {"credit": "GRAIL"},
    "grail_own_pass": {"credit": "GRAIL", "own_pass": True},
    "oar_g": {"credit": "OARGradient"},
    "ucas": {"credit": "UCAS"},
    "rlsd": {"credit": "RLSD"},
    "one_step_a_batch": {"mini_batches": 1},
    "two_passes": {"updates_per_batch": 2},
    "grail_two_passes": {"credit": "GRAIL", "updates_per_batch": 2},
    "kl": {"kl_coefficient": 0.05, "updates_per_batch": 2},
    "lora": {"lora": True, "kl_coefficient": 0.05},
    "grail_lora": {"credit": "GRAIL", "lora": True},
    "dynamic_sampling": {"refill_rounds": 2},
    "masters": {"dtype": "bfloat16"},
    "grail_masters": {"credit": "GRAIL", "dtype": "bfloat16"},
    "checkpointed": {"credit": "GRAIL", "gradient_checkpointing": True},
    "ddp": {"credit": "GRAIL", "strategy": "ddp"},
    "fsdp2": {"credit": "GRAIL", "strategy": "fsdp2"},
}


def options(flat: dict) -> dict:
    """The module's groups of options in this version."""
    known = {f.name for f in dataclasses.fields(Objective)}
    groups = {"objective": Objective(**{k: v for k, v in flat.items() if k in known})}
    if Execution is not None:
        groups["execution"] = Execution(**{k: v for k, v in flat.items() if k not in known})
    return groups


def module(case: dict, share: bool) -> GrailModule:
    """The quickstart's module with the changes of one case."""
    case = dict(case)
    lora, dtype = case.pop("lora", False), case.pop("dtype", "float32")
    loading = Loading(
        lora=LoRA(rank=4) if lora else None,
        dtype=dtype,
        gradient_checkpointing=case.pop("gradient_checkpointing", False),
    )
    case.pop("strategy", None)
    credit = case.pop("credit", "Uniform")
    fused = "share_forward" if Execution is None else "fuse"
    own = {"saliency": methods.SaliencyOptions(**{fused: False})} if case.pop("own_pass", False) else {}
    sharing = "share_prompts" if Execution is None else "share_prefixes"
    flat = {"group_size": 8, "mini_batches": 2, "token_budget": 1024, sharing: share, **case}
    return GrailModule(
        "arithmetic",
        sampling=Sampling(max_response_length=64),
        loading=loading,
        credit=getattr(methods, credit)(**own),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0),
        **options(flat),
    )


def run(name: str, share: bool, file: str) -> None:
    """Train one case and write its weights."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    strategy = CASES[name].get("strategy")
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    made = module(CASES[name], share)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if strategy else 1,
        strategy={None: "auto", "ddp": "ddp", "fsdp2": sharded}[strategy],
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(made, ArithmeticData(num_val=8, prompts_per_batch=16))
    assert made.policy is not None
    weights = dict(made.policy.named_parameters())
    whole = {n: whole_tensor(w) for n, w in weights.items()}
    if trainer.is_global_zero:
        save_file({n: w.clone().contiguous() for n, w in whole.items() if w.numel()}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--share", action="store_true", help="run what rows have in common once")
    chosen = parser.parse_args()
    if chosen.action == "run":
        run(chosen.cases[0], chosen.share, str(chosen.folder))
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    suffix = ".share" if chosen.share else ""
    for name in chosen.cases or CASES:
        kept = chosen.folder / f"{name}{suffix}.safetensors"
        made = kept if chosen.action == "record" else kept.with_suffix(".new")
        command = [sys.executable, __file__, "run", str(made), name] + ["--share"] * chosen.share
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            print(f"{name}: failed\n{done.stderr[-1500:]}", flush=True)
            continue
        if chosen.action == "record":
            print(f"{name}: recorded", flush=True)
            continue
        before, after = load_file(kept), load_file(made)
        same = before.keys() == after.keys() and all(torch.equal(w, after[n]) for n, w in before.items())
        gap = max((float((w.double() - after[n].double()).abs().max()) for n, w in before.items() if n in after))
        print(f"{name}: {'bit for bit the same' if same else f'at most {gap:.2e} apart'}", flush=True)


if __name__ == "__main__":
    main()
