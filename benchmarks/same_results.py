"""The same results: of two versions of the package, however a step is run, after a resume, and that two ranks end.

    python benchmarks/same_results.py record FOLDER [CASE ...]      # with the earlier version
    python benchmarks/same_results.py compare FOLDER [CASE ...]     # with the later one: bit for bit, or how far apart
    python benchmarks/same_results.py layout --runs 100             # how a step is run changes nothing in what it does
    python benchmarks/same_results.py resume --runs 100             # a resumed run equals an uninterrupted one
    python benchmarks/same_results.py ranks --runs 30               # two ranks end, under DDP and under FSDP2

All runs go through the command line, so that versions whose classes have other names can be compared; those on one
device are on a GPU with `GRAIL_TEST_DEVICE=cuda`. `record` and `compare` take a few batches in the setting of the
quickstart. Both versions must run on the same machine: other processors round differently. The other three draw
combinations of options that no test has thought of. `layout` takes the optimiser steps of one batch, and takes them
again with whole rows in one micro-batch. Plain SGD keeps the change of the weights proportional to the gradients, so
both changes are compared, which may differ by roundings. `resume` takes four batches, and again with a stop at a random
step, which may be inside a batch; the weights must be equal bit for bit. `ranks` takes three batches on two processes,
which must both end within three minutes: ranks that call different collectives stop each other, or wait for ever. A
combination may also be refused, in one line. Anything else is printed with the options that repeat it; the exit code is
then 1, as it is if a case differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from grail_lightning.app.cli.app import main as command_line
from grail_lightning.core.policy.load import load_policy

CONFIGS = Path(__file__).parents[1] / "configs"
BATCHES = 4
ON_GPU = os.environ.get("GRAIL_TEST_DEVICE") == "cuda"
RANKS_SECONDS = 180
# Largest relative difference of the change of the weights, by precision. Under 64-true Transformers normalises in
# float32; half precision rounds every activation.
TOLERANCE = {None: 1e-3, "64-true": 1e-5, "bf16-mixed": 0.3}
NO_CHANGE = 1e-6  # A change that small is itself made of roundings: the KL to the policy itself, say.

Options = Mapping[str, str | None]
Table = dict[str, list[str | None]]

# What is drawn: an option's value is left out where it is None or "-"; one that stands twice is drawn twice as often.
CREDIT = {
    "Uniform": "",
    "GRAIL": "gate=-,positive,all answer_overwrite=-,gated,never normalise=-,mean_one std=-,0.3 "
    "saliency.read_at=-,token saliency.box=-,first saliency.refresh=-,-,step saliency.fuse=-,true,false",
    "OARGradient": "distribution=-,last,answer_joint scope=-,response read_at=-,token product=-,noisy",
    "OARPerturbation": "",
    "HighEntropy": "",
    "AdvantageReweighting": "",
    "LESS": "share=-,0.5",
    "UCAS": "standardise=-,true,false",
    "RLSD": "",
    "DGPO": "temperature=-,0.5",
    "PRIME": "double_forward=-,true,false normalise=-,true,false",
    "AttentionRhythm": "rhythm=-,anchor,coupled gate=-,all",
    "Resampled": "continuations=2 search=-,everywhere gate=-,positive,all advantage=-,true,false",
    "TreeAdvantage": "own_row=-,true,false standardise=-,true,false advantage=-,true,false",
    "PrefixWeights": "",
    "OptimalBaseline": "unit=-,turn",
    "GiGPO": "standardise=-,true,false",
    "IGPO": "standardise=-,true,false normalise=-,separate",
    "Oracle": "right=-,balanced",
    "PermutedRewards": "inner=TreeAdvantage,Oracle,UCAS mirrored=-,true,false",
}
ADVANTAGE = {
    "GroupMean": "scale=none,group,batch share=-,0.5,0",
    "EnergyBaseline": "scale=none,group,batch",
    "BNPO": "share=-,0.5",
    "LeaveOneOut": "scale=none,batch",
    "BatchNormalised": "share=-,0.5",
    "GDPO": "scale_batch=-,true,false",
}
OBJECTIVE = {"DrGRPO": "", "GRPO": "", "DAPO": "", "CISPO": "", "GSPOToken": "", "SDPG": "coefficient=0.1"}
# Methods that compute the whole advantage, beside which an estimator is refused.
WHOLE_ADVANTAGE = ("PRIME", "OptimalBaseline", "IGPO")
CONTROLS = ["Shuffled", "Random", "AnswerOnly", "SameMagnitude", "Balanced"]
WHAT: Table = {
    "model.credit": [*CREDIT],
    "model.engine": [None, None, "HFEngine --model.engine.cache_tokens=400"],
    "model.control": [None, None, None, *CONTROLS],
    "model.loading.lora.rank": [None, None, "4"],
    "model.objective": ["DrGRPO", "DrGRPO", *OBJECTIVE],
    "model.objective.aggregation": [None, "grpo", "dr_grpo", "dapo"],
    "model.advantage": [*ADVANTAGE],
    "model.objective.level": [None, None, "token", "sequence"],
    "model.objective.surrogate": [None, None, "clip", "cispo"],
    "model.objective.ratio_cap": [None, None, "3"],
    "model.objective.entropy_coefficient": [None, None, "0.01"],
    "model.objective.kl_coefficient": [None, None, "0.05"],
    "model.objective.kl_estimator": [None, "k1", "k2", "k3"],
    "model.objective.kl_corrected": [None, "true", "false"],
    "model.objective.mask_truncated": [None, "true", "false"],
    "model.execution.group_size": ["2", "4", "6"],
    "model.execution.refill_rounds": [None, None, "1"],
    "model.execution.num_iterations": ["1", "1", "2"],
    "model.execution.mini_batches": ["1", "1", "2", "3"],
    "model.execution.split_groups": [None, None, None, "true"],
    "model.execution.sampler_cap": [None, "null", "2"],
    "model.execution.max_grad_norm": [None, "null", "0.1"],
    "model.sampling.temperature": [None, "0.7"],
    "model.sampling.max_response_length": ["36", "64"],
    "data.few_shot.number": [None, None, "2"],
    "trainer.precision": [None, None, "bf16-mixed"],
    "config": ["quickstart.yaml", "quickstart.yaml", "quickstart_words.yaml"],
}
HOW: Table = {
    "model.execution.token_budget": ["128", "300", "16384"],
    "model.execution.share_prefixes": ["true", "false"],
    "model.loading.gradient_checkpointing": ["true", "false"],
    "model.loading.packing": ["true", "false", "false"],
    "model.loading.chunk_tokens": ["128", "4096"],
}
WHOLE_ROWS = (
    "model.execution.token_budget=100000 model.execution.share_prefixes=false "
    "model.loading.gradient_checkpointing=false model.loading.packing=false"
)
SCHEDULES = ("LinearLR", "StepLR --model.scheduler.step_size=2")
STATE: Table = {
    "model.optimizer": [f"torch.optim.{name}" for name in ("SGD", "AdamW", "AdamW", "Adafactor", "RMSprop")],
    "model.scheduler": [None, None, *(f"torch.optim.lr_scheduler.{name}" for name in SCHEDULES)],
    "model.loading.dtype": ["float32", "float32", "bfloat16"],
    "model.sampling.top_p": [None, None, "0.9"],
    "last_checkpoint.every_n_batches": ["0", "1", "2"],
    "evaluation.at_start": ["true", "false"],
    "trainer.limit_val_batches": ["0", "1.0"],
}


# The cases of `record` and `compare`: what each changes.
QUICKSTART = (
    "config=quickstart.yaml model.credit=Uniform model.optimizer.lr=1e-3 model.execution.token_budget=600 "
    f"trainer.limit_val_batches=0 trainer.max_steps={2 * BATCHES} evaluation.at_start=false"
)
CASES = {
    "grpo": "",
    **{name: f"model.credit={name}" for name in CREDIT if name != "Uniform"},
    "Resampled": "model.credit=Resampled model.credit.continuations=2",
    "PermutedRewards": "model.credit=PermutedRewards model.credit.inner=TreeAdvantage",
    **{name: f"model.credit=GRAIL model.control={name}" for name in CONTROLS},
    "own_pass": "model.credit=GRAIL model.credit.saliency.fuse=false",
    "refreshed": "model.credit=GRAIL model.credit.saliency.refresh=step model.execution.num_iterations=2",
    "whole_rows": "model.credit=GRAIL model.execution.share_prefixes=false",
    "two_passes": "model.credit=GRAIL model.execution.num_iterations=2",
    "kl": "model.objective.kl_coefficient=0.05 model.execution.num_iterations=2",
    "entropy": "model.credit=GRAIL model.objective.entropy_coefficient=0.01",
    "sequence": "model.objective.level=sequence model.objective.aggregation=grpo",
    "cispo": "model.objective.surrogate=cispo model.advantage=GroupMean model.advantage.scale=batch",
    "distillation": "model.objective=SDPG model.objective.coefficient=0.1 model.objective.mask_truncated=true",
    "packing": "model.credit=GRAIL model.loading.packing=true model.execution.share_prefixes=false",
    "checkpointed": "model.credit=GRAIL model.loading.gradient_checkpointing=true",
    "lora": "model.credit=GRAIL model.loading.lora.rank=4 model.objective.kl_coefficient=0.05",
    "masters": "model.credit=GRAIL model.loading.dtype=bfloat16",
    "refill": "model.execution.refill_rounds=2",
    "words": "config=quickstart_words.yaml model.credit=GRAIL data.few_shot.number=1",
    "search": "config=quickstart_search.yaml",
    "charts": "config=quickstart_charts.yaml model.credit=SpanScores",
    "code": "config=quickstart_code.yaml model.credit=EGCA",
    "sample_ahead": "model.engine=tests.copying_engine.Elsewhere model.execution.sample_ahead=true "
    "model.execution.sampler_cap=2",
    "ddp": "model.credit=GRAIL trainer.devices=2 trainer.strategy=ddp",
    "fsdp2": "model.credit=GRAIL trainer.devices=2 trainer.strategy=ModelParallelStrategy",
}
CASES |= {f"{name}_resumed": CASES[name] for name in ("grpo", "GRAIL", "PRIME", "RLSD", "sample_ahead", "masters")}

AT_HAND = [name for name, what in CASES.items() if not (ON_GPU and "trainer.devices" in what)]


# --- runs -------------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """How a run ended."""

    code: int  # The exit code; 1 for an error that is no refusal.
    said: str  # The refusal, or the end of what it said.
    folder: Path

    def state(self) -> dict[str, Any]:
        """The last checkpoint."""
        (file,) = self.folder.glob("*/checkpoints/last.ckpt")
        if file.is_dir():  # Each rank wrote its shards.
            folder, file = file, file.with_suffix(".pt")
            dcp_to_torch_save(folder, file)
        return torch.load(file, weights_only=True)


def options_of(text: str) -> dict[str, str | None]:
    """``name=value name=value`` as options."""
    return {name: value for name, _, value in (part.partition("=") for part in text.split())}


def arguments(options: Options, folder: Path) -> list[str]:
    """The arguments of the command line. On a GPU, only deterministic kernels can repeat a run bit for bit."""
    if ON_GPU:
        options = {**options, "trainer.accelerator": "gpu", "trainer.deterministic": "true"}
    small = "data.prompts_per_batch=6 data.num_train=24 data.num_val=8 data.num_test=8"
    fixed = options_of(f"trainer.enable_progress_bar=false pictures.every_n_batches=0 checkpoint.save_top_k=0 {small}")
    fixed |= {"trainer.logger.init_args.save_dir": str(folder), "export.folder": str(folder / "export")}
    whole = {"config": None} | fixed | dict(options) | {"config": str(CONFIGS / str(options["config"]))}
    given = [f"--{name}={value}" for name, value in whole.items() if value is not None]
    return ["fit", *(part for argument in given for part in argument.split(" "))]


def fit(options: Options, folder: Path) -> Fit:
    """Run the command in this process."""
    code, raised, console = 0, "", io.StringIO()
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
        sys.argv[1:] = arguments(options, folder)
        try:
            command_line()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # What no user should ever see.
            code, raised = 1, traceback.format_exc()
    refusals = [line for line in console.getvalue().splitlines() if "error:" in line]
    refused = code == 2 and len(refusals) == 1
    return Fit(2 if refused else min(code, 1), raised or "\n".join(refusals), folder)


def fit_on_ranks(options: Options, folder: Path) -> Fit:
    """Run the command on two ranks: processes of their own, which start this command again."""
    command = [sys.executable, "-m", "grail_lightning", *arguments(options, folder)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **quiet, start_new_session=True) as ranks:
        try:
            lines = ranks.communicate(timeout=RANKS_SECONDS)[1].splitlines()
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            return Fit(1, f"It had not ended after {RANKS_SECONDS} seconds.", folder)
    refusals = [line for line in lines if "error:" in line]
    # Each rank may print the refusal.
    refused = ranks.returncode == 2 and 0 < len(refusals) <= 2 and not any("Traceback" in line for line in lines)
    code = 2 if refused else min(abs(ranks.returncode), 1)
    return Fit(code, refusals[0] if refused else "\n".join(lines[-20:]), folder)


# --- random combinations ----------------------------------------------------------------------------------------------


def draw(rng: random.Random, tables: Mapping[str, list[str | None]]) -> dict[str, str | None]:
    """A value for each option. Values that cannot go together by their meaning are left out."""
    drawn = {name: rng.choice(values) for name, values in tables.items()}
    for part, classes in (("model.credit", CREDIT), ("model.advantage", ADVANTAGE), ("model.objective", OBJECTIVE)):
        for option in classes[drawn[part] or "Uniform"].split() if part in drawn else ():
            name, _, values = option.partition("=")
            value = rng.choice(values.split(","))
            drawn[f"{part}.{name}"] = None if value == "-" else value
    if "cispo" in (drawn.get("model.objective.surrogate"), str(drawn.get("model.objective")).lower()):
        drawn |= {"model.objective.surrogate": "cispo", "model.objective.ratio_cap": None}
    if drawn.get("model.credit") in WHOLE_ADVANTAGE:
        drawn = {name: value for name, value in drawn.items() if not name.startswith("model.advantage")}
    if drawn.get("config") == "quickstart.yaml":  # Its data are generated without worked solutions.
        drawn["data.few_shot.number"] = None
    return drawn


def steps_of(drawn: Options) -> int:
    """The optimiser steps of a batch."""
    return int(drawn["model.execution.num_iterations"] or 1) * int(drawn["model.execution.mini_batches"] or 1)


def same_layout(rng: random.Random, folder: Path) -> tuple[Options, Fit, str]:
    """A combination, its run, and how it differs from the run of whole rows; empty if it does not."""
    sgd = "model.optimizer=torch.optim.SGD model.optimizer.lr=0.05"
    one_batch = "trainer.max_steps=100 trainer.limit_train_batches=1 trainer.max_epochs=1 trainer.limit_val_batches=0"
    what = draw(rng, WHAT | {"trainer.precision": [None, None, "bf16-mixed", "64-true"]})
    if (what["model.objective"], what["trainer.precision"]) == ("GSPOToken", "bf16-mixed"):
        # Its clips of 3e-4 are below the rounding of half precision, which decides what later steps clip.
        what["trainer.precision"] = None
    options = what | draw(rng, HOW) | options_of(f"{sgd} {one_batch}")
    first = fit(options, folder / "drawn")
    if first.code:
        return options, first, first.said if first.code == 1 else ""
    whole = fit(options | options_of(WHOLE_ROWS), folder / "whole")
    if whole.code:
        return options, whole, f"Only with whole rows: {whole.said}"
    policy = "words" if what["config"] == "quickstart_words.yaml" else "arithmetic"
    one, other = (run.state()["state_dict"] for run in (first, whole))
    moved = max(change(weights, policy) for weights in (one, other))
    apart = sum((value - one[name]).double().square().sum().item() for name, value in other.items())
    limit = TOLERANCE[what["trainer.precision"]]
    wrong = not moved**0.5 <= NO_CHANGE and not apart**0.5 <= limit * moved**0.5  # NaN is wrong, too.
    return options, first, f"The change of the weights differs by {(apart / moved) ** 0.5:.2g}." if wrong else ""


def change(weights: Mapping[str, Tensor], policy: str) -> float:
    """The squared norm of what training has changed. Adapters begin with one factor of 0, and that one alone counts."""
    if adapters := [value for name, value in weights.items() if ".lora_B." in name]:
        return sum(value.double().square().sum().item() for value in adapters)
    begun = {f"policy.{name}": value for name, value in load_policy(policy).state_dict().items()}
    return sum((value - begun[name]).double().square().sum().item() for name, value in weights.items())


def same_resumed(rng: random.Random, folder: Path) -> tuple[Options, Fit, str]:
    """A combination, its run, and how the resumed run differs; empty if it does not."""
    what = draw(rng, WHAT | STATE)
    options = what | draw(rng, HOW)
    options |= {"model.optimizer.lr": "1e-3", "trainer.max_epochs": "-1", "trainer.val_check_interval": "2"}
    steps = BATCHES * steps_of(what)
    stop = str(rng.randint(1, steps - 1))
    whole = fit(options | {"trainer.max_steps": str(steps)}, folder / "whole")
    if whole.code:
        return options, whole, whole.said if whole.code == 1 else ""
    for part in ({"trainer.max_steps": stop}, {"trainer.max_steps": str(steps), "ckpt_path": "last"}):
        halves = fit(options | part, folder / "halves")
        if halves.code:
            return options | part, halves, f"Only in parts: {halves.said}"
    one, other = whole.state(), halves.state()
    equal = [torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items()]
    wrong = not all(equal) or one["global_step"] != other["global_step"]
    return options | {"trainer.max_steps": stop}, halves, f"{equal.count(False)} tensors differ." if wrong else ""


def two_ranks(rng: random.Random, folder: Path) -> tuple[Options, Fit, str]:
    """A combination on two ranks, its run, and how it failed; empty if it did not."""
    what = draw(rng, WHAT | STATE | {"trainer.strategy": ["ddp", "ModelParallelStrategy"]}) | draw(rng, HOW)
    if what["trainer.strategy"] != "ddp":
        # Half precision is that of the computation there, and torch's Adafactor cannot update shards.
        what |= {"model.loading.dtype": None, "model.loading.reduce_once": rng.choice([None, "true", "false"])}
        what["model.optimizer"] = str(what["model.optimizer"]).replace("Adafactor", "AdamW")
    options = what | {"trainer.devices": "2", "trainer.max_epochs": "-1", "trainer.val_check_interval": "2"}
    options |= {"model.optimizer.lr": "1e-3", "trainer.max_steps": str(3 * steps_of(what))}
    made = fit_on_ranks(options, folder / "ranks")
    return options, made, made.said if made.code == 1 else ""


CHECKS = {"layout": same_layout, "resume": same_resumed, "ranks": two_ranks}


def combine(name: str, runs: int, seed: int) -> bool:
    """Print each combination that fails, and how the others ended; whether all went well."""
    rng, ended = random.Random(seed), Counter()
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            options, made, wrong = CHECKS[name](rng, Path(folder))
        ended["differ or fail" if wrong else "refused in one line" if made.code == 2 else "equal"] += 1
        if wrong:
            print(f"\n{number}: {wrong}\n  {' '.join(arguments(options, Path('runs')))}", flush=True)
        elif made.code == 2:
            print(f"{number}: {made.said}", flush=True)
    print(f"{name}, seed {seed}: " + ", ".join(f"{count} {how}" for how, count in ended.items()))
    if ended["refused in one line"] > runs / 2:
        sys.exit("More than half were refused, so little was compared. Correct the tables of this script.")
    return not ended["differ or fail"]


# --- versions ---------------------------------------------------------------------------------------------------------


def final_weights(name: str, folder: Path) -> dict[str, Tensor] | str:
    """The final weights of a case, or why it did not end well."""
    options = options_of(f"{QUICKSTART} {CASES[name]}")
    # A run that is resumed stops inside its third batch first.
    parts = [{"trainer.max_steps": "5"}, {"ckpt_path": "last"}] if name.endswith("_resumed") else [{}]
    for part in parts:
        made = (fit_on_ranks if "trainer.devices" in options else fit)(options | part, folder)
        if made.code:
            return made.said
    return made.state()["state_dict"]


def versions(action: str, folder: Path, cases: list[str]) -> bool:
    """Record or compare; whether all are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    differing = 0
    for name in cases:
        with tempfile.TemporaryDirectory() as scratch:
            weights = final_weights(name, Path(scratch, "run"))
        if isinstance(weights, str):
            differing, how = differing + 1, f"failed\n{weights}"
        elif action == "record":
            torch.save(weights, folder / f"{name}.pt")
            how = "recorded"
        else:
            before = torch.load(folder / f"{name}.pt", weights_only=True)
            same = before.keys() == weights.keys() and all(torch.equal(w, weights[n]) for n, w in before.items())
            gap = max((w.double() - weights[n].double()).abs().max().item() for n, w in before.items() if n in weights)
            differing, how = differing + (not same), "bit for bit the same" if same else f"at most {gap:.2e} apart"
        print(f"{name}: {how}", flush=True)
    return not differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", *CHECKS])
    parser.add_argument("folder", type=Path, nargs="?", help="of record and compare")
    parser.add_argument("cases", nargs="*", default=AT_HAND, metavar="CASE")
    parser.add_argument("--runs", type=int, default=100, help="the number of combinations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    if asked.action in CHECKS:
        sys.exit(not combine(asked.action, asked.runs, asked.seed))
    sys.exit(not versions(asked.action, asked.folder, asked.cases))


if __name__ == "__main__":
    main()
