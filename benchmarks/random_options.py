"""Random combinations of options, through the command line: what no test has thought of combining.

    python benchmarks/random_options.py layout --runs 100       # how a step is run changes nothing in what it does
    python benchmarks/random_options.py resume --runs 100       # a resumed run equals an uninterrupted one
    python benchmarks/random_options.py ranks --runs 30         # two ranks end, under DDP and under FSDP2

Each combination draws a credit method, a control, an objective, adapters, precision, data and so on at random, and how
the step is run: token budget, common prefixes, checkpointed blocks, packing, chunks of the head.

`layout` takes the optimiser steps of one batch, and takes them again with whole rows in one micro-batch. Plain SGD
keeps the change of the weights proportional to the gradients, so both changes are compared, which may differ by
roundings. `resume` takes four batches, and takes them again with a stop at a random step, which may be inside a batch;
the weights must be equal bit for bit. `ranks` takes three batches on two processes, which must both end within
three minutes: ranks that call different collectives stop each other, or wait for ever.

A combination may also be refused, in one line. Anything else is printed with the options that repeat it, and ends the
script with exit code 1. Two seconds a run on one core; start several with other seeds.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from grail_lightning.cli import main as command_line
from grail_lightning.policy import load_policy

CONFIGS = Path(__file__).parents[1] / "configs"
BATCHES = 4
# Largest relative difference of the change of the weights, by precision. Under 64-true Transformers normalises in
# float32; half precision rounds every activation.
TOLERANCE = {None: 1e-3, "64-true": 1e-5, "bf16-mixed": 0.3}
NO_CHANGE = 1e-6  # A change that small is itself made of roundings: the KL to the policy itself, say.

# None leaves an option out; a value that stands twice is drawn twice as often.
FLAG = [None, "true", "false"]
CREDIT: dict[str, dict[str, list[str | None]]] = {
    "Uniform": {},
    "GRAIL": {
        "gate": [None, "positive", "all"],
        "answer_overwrite": [None, "gated", "never"],
        "normalise": [None, "mean_one"],
        "std": [None, "0.3"],
        "saliency.alignment": [None, "token"],
        "saliency.box": [None, "first"],
        "saliency.refresh": [None, None, "update"],
        "saliency.fuse": FLAG,
    },
    "OARGradient": {
        "distribution": [None, "last", "answer_joint"],
        "scope": [None, "response"],
        "alignment": [None, "token"],
        "product": [None, "noisy"],
    },
    "OARPerturbation": {},
    "HighEntropy": {},
    "AdvantageReweighting": {},
    "LESS": {"share": [None, "0.5"]},
    "UCAS": {"standardise": FLAG},
    "RLSD": {},
    "DGPO": {"temperature": [None, "0.5"]},
    "PRIME": {"double_forward": FLAG, "normalise": FLAG},
    "AttentionRhythm": {"rhythm": [None, "anchor", "coupled"], "gate": [None, "all"]},
    "Resampled": {
        "continuations": ["2"],
        "search": [None, "everywhere"],
        "gate": [None, "positive", "all"],
        "advantage": FLAG,
    },
    "TreeAdvantage": {"own_row": FLAG, "standardise": FLAG, "advantage": FLAG},
    "PrefixWeights": {},
    "OptimalBaseline": {"unit": [None, "turn"]},
    "GiGPO": {"standardise": FLAG},
    "IGPO": {"standardise": FLAG, "normalise": [None, "separate"]},
    "Oracle": {"right": [None, "balanced"]},
    "WarmUp": {"inner": ["GRAIL", "PRIME", "TreeAdvantage", "Resampled"], "steps": ["1", "3"]},
    "Product": {"first": ["GRAIL", "LESS"], "second": ["HighEntropy", "UCAS", "AttentionRhythm"]},
    "PermutedRewards": {"inner": ["TreeAdvantage", "Oracle", "UCAS"], "mirrored": FLAG},
}
WHAT: dict[str, list[str | None]] = {
    "model.credit": [*CREDIT],
    "model.engine": [None, None, "HFEngine --model.engine.cache_tokens=400"],
    "model.control": [None, None, None, "Shuffled", "Random", "AnswerOnly", "SameMagnitude", "Balanced"],
    "model.loading.lora.rank": [None, None, "4"],
    "model.objective.aggregation": ["grpo", "dr_grpo", "dapo"],
    "model.objective.scale_rewards": ["none", "group", "batch", "bnpo"],
    "model.objective.baseline": [None, None, "0.5", "0", "energy"],
    "model.objective.level": ["token", "token", "sequence"],
    "model.objective.surrogate": ["clip", "clip", "cispo"],
    "model.objective.ratio_cap": [None, None, "3"],
    "model.objective.entropy_coefficient": [None, None, "0.01"],
    "model.objective.kl_coefficient": [None, None, "0.05"],
    "model.objective.kl_estimator": [None, "k1", "k2", "k3"],
    "model.objective.kl_corrected": [None, "true", "false"],
    "model.objective.mask_truncated": [None, "true", "false"],
    "model.objective.distillation.coefficient": [None, None, None, "0.1"],
    "model.execution.group_size": ["2", "4", "6"],
    "model.execution.refill_rounds": [None, None, "1"],
    "model.execution.updates_per_batch": ["1", "1", "2"],
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
HOW: dict[str, list[str | None]] = {
    "model.execution.token_budget": ["128", "300", "16384"],
    "model.execution.share_prefixes": ["true", "false"],
    "model.loading.gradient_checkpointing": ["true", "false"],
    "model.loading.packing": ["true", "false", "false"],
    "model.loading.chunk_tokens": ["128", "4096"],
}
WHOLE_ROWS = {
    "model.execution.token_budget": "100000",
    "model.execution.share_prefixes": "false",
    "model.loading.gradient_checkpointing": "false",
    "model.loading.packing": "false",
}
RESUMED: dict[str, list[str | None]] = {
    "model.optimizer": ["SGD", "AdamW", "AdamW", "Adafactor", "RMSprop"],
    "model.scheduler": [None, None, "LinearLR", "StepLR --model.scheduler.step_size=2"],
    "model.loading.dtype": ["float32", "float32", "bfloat16"],
    "model.sampling.top_p": [None, None, "0.9"],
    "last_checkpoint.every_n_batches": ["0", "1", "2"],
    "evaluation.at_start": ["true", "false"],
    "trainer.limit_val_batches": ["0", "1.0"],
}

RANKS_SECONDS = 180

Options = Mapping[str, str | None]


class Fit(NamedTuple):
    """How a run ended.

    Attributes:
        code: The exit code; 1 for an error that is no refusal.
        said: The refusal, or the traceback.
        state: The last checkpoint.
    """

    code: int
    said: str
    state: dict[str, object]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of the policy."""
        found = self.state["state_dict"]
        assert isinstance(found, dict)
        return found


def draw(rng: random.Random, tables: Mapping[str, list[str | None]]) -> dict[str, str | None]:
    """A value for each option. Values that cannot go together by their meaning are left out."""
    drawn = {name: rng.choice(values) for name, values in tables.items()}
    for name, values in CREDIT.get(drawn.get("model.credit") or "", {}).items():
        drawn[f"model.credit.{name}"] = rng.choice(values)
    if drawn.get("model.objective.surrogate") == "cispo":
        drawn["model.objective.ratio_cap"] = None
    if drawn.get("config") == "quickstart.yaml":  # Its data are generated without worked solutions.
        drawn["data.few_shot.number"] = None
    return drawn


def name_classes(drawn: dict[str, str | None]) -> None:
    """Write the import paths of torch's optimisers and schedules."""
    for name, package in (("model.optimizer", "torch.optim"), ("model.scheduler", "torch.optim.lr_scheduler")):
        drawn[name] = drawn[name] and f"{package}.{drawn[name]}"


def steps_of(drawn: Options) -> int:
    """The optimiser steps of a batch."""
    names = ("model.execution.updates_per_batch", "model.execution.mini_batches")
    return math.prod(int(drawn[name] or 1) for name in names)


def arguments(options: Options, folder: Path) -> list[str]:
    """The arguments of the command line."""
    options = dict(options)
    config = options.pop("config")
    fixed = {
        "config": str(CONFIGS / str(config)),
        "trainer.logger.init_args.save_dir": str(folder),
        "trainer.enable_progress_bar": "false",
        "pictures.every_n_batches": "0",
        "checkpoint.save_top_k": "0",
        "export.folder": str(folder / "export"),
        "data.prompts_per_batch": "6",
        "data.num_train": "24",
        "data.num_val": "8",
        "data.num_test": "8",
    }
    given = [f"--{name}={value}" for name, value in {**fixed, **options}.items() if value is not None]
    return ["fit", *(part for argument in given for part in argument.split(" "))]


def fit(options: Options, folder: Path) -> Fit:
    """Run the command in this process, and collect what it leaves."""
    code, said = 0, ""
    with console(folder.with_suffix(".txt")) as written:
        sys.argv[1:] = arguments(options, folder)
        try:
            command_line()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # What no user should ever see.
            code, said = 1, traceback.format_exc()
    refusals = [line for line in written.read_text().splitlines() if "error:" in line]
    if code == 2 and len(refusals) == 1:
        return Fit(2, refusals[0], {})
    (file,) = folder.glob("*/checkpoints/last.ckpt") if code == 0 else (None,)
    return Fit(1 if code else 0, said or "\n".join(refusals), torch.load(file, weights_only=True) if file else {})


@contextmanager
def console(file: Path) -> Iterator[Path]:
    """Write what reaches the console to a file."""
    sys.stdout.flush()
    kept = [os.dup(number) for number in (1, 2)]
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for number in (1, 2):
            os.dup2(descriptor, number)
        yield file
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(descriptor)


def same_layout(rng: random.Random, folder: Path) -> tuple[Options, Fit, str]:
    """A combination, its run, and how it differs from the run of whole rows; empty if it does not."""
    one_batch = {"model.optimizer": "torch.optim.SGD", "model.optimizer.lr": "0.05", "trainer.max_steps": "100"}
    one_batch |= {"trainer.limit_train_batches": "1", "trainer.max_epochs": "1", "trainer.limit_val_batches": "0"}
    what = draw(rng, WHAT | {"trainer.precision": [None, None, "bf16-mixed", "64-true"]})
    options = what | draw(rng, HOW) | one_batch
    first = fit(options, folder / "drawn")
    if first.code:
        return options, first, first.said if first.code == 1 else ""
    whole = fit(options | WHOLE_ROWS, folder / "whole")
    if whole.code:
        return options, whole, f"Only with whole rows: {whole.said}"
    policy = "words" if what["config"] == "quickstart_words.yaml" else "arithmetic"
    moved = max(change(fitted.weights, policy) for fitted in (first, whole))
    apart = sum((value - first.weights[name]).double().square().sum().item() for name, value in whole.weights.items())
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
    what = draw(rng, WHAT | RESUMED)
    name_classes(what)
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
    equal = [torch.equal(value, halves.weights[name]) for name, value in whole.weights.items()]
    wrong = not all(equal) or whole.state["global_step"] != halves.state["global_step"]
    return options | {"trainer.max_steps": stop}, halves, f"{equal.count(False)} tensors differ." if wrong else ""


def two_ranks(rng: random.Random, folder: Path) -> tuple[Options, Fit, str]:
    """A combination on two ranks, its run, and how it failed; empty if it did not."""
    what = draw(rng, WHAT | RESUMED | {"trainer.strategy": ["ddp", "ModelParallelStrategy"]}) | draw(rng, HOW)
    name_classes(what)
    if what["trainer.strategy"] != "ddp":
        # Half precision is that of the computation there, and torch's Adafactor cannot update shards.
        what |= {"model.loading.dtype": None, "model.loading.reduce_once": rng.choice(FLAG)}
        what["model.optimizer"] = str(what["model.optimizer"]).replace("Adafactor", "AdamW")
    options = what | {"trainer.devices": "2", "trainer.max_epochs": "-1", "trainer.val_check_interval": "2"}
    options |= {"model.optimizer.lr": "1e-3", "trainer.max_steps": str(3 * steps_of(what))}
    command = [sys.executable, "-m", "grail_lightning", *arguments(options, folder / "ranks")]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **quiet, start_new_session=True) as ranks:
        try:
            lines = ranks.communicate(timeout=RANKS_SECONDS)[1].splitlines()
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            return options, Fit(1, "", {}), f"It had not ended after {RANKS_SECONDS} seconds."
    refusals = [line for line in lines if "error:" in line]
    made = Fit(ranks.returncode, refusals[0] if refusals else "", {})
    # Each rank may print the refusal.
    refused = made.code == 2 and 0 < len(refusals) <= 2 and not any("Traceback" in line for line in lines)
    return options, made, "" if made.code == 0 or refused else "\n".join(lines[-20:])


def main() -> None:
    """Print each combination that fails, and how the others ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = {"layout": same_layout, "resume": same_resumed, "ranks": two_ranks}
    parser.add_argument("check", choices=checks)
    parser.add_argument("--runs", type=int, default=100, help="the number of combinations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, check = random.Random(asked.seed), checks[asked.check]
    torch.set_num_threads(1)
    ended: Counter[str] = Counter()
    for number in range(asked.runs):
        with tempfile.TemporaryDirectory() as folder:
            options, made, wrong = check(rng, Path(folder))
        ended["differ or fail" if wrong else "refused in one line" if made.code == 2 else "equal"] += 1
        if wrong:
            print(f"\n{number}: {wrong}\n  {' '.join(arguments(options, Path('runs')))}", flush=True)
        elif made.code == 2:
            print(f"{number}: {made.said}", flush=True)
    print(f"{asked.check}, seed {asked.seed}: " + ", ".join(f"{count} {how}" for how, count in ended.items()))
    if ended["refused in one line"] > asked.runs / 2:
        sys.exit("More than half were refused, so little was compared. Correct the tables of this script.")
    sys.exit(1 if ended["differ or fail"] else 0)


if __name__ == "__main__":
    main()
