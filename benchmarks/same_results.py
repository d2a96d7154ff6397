"""Final weights after a few batches of the quickstart's setting, to compare two versions of the package.

    python benchmarks/same_results.py record FOLDER [CASE ...]      # with the earlier version
    python benchmarks/same_results.py compare FOLDER [CASE ...]     # with the later one: bit for bit, or how far apart

Cases run through the command line, so that versions whose classes have other names can be compared: every credit
method and control, objectives, adapters, precision, packing, a batch sampled ahead, a resume, and two ranks.
`compare` ends with exit code 1 if a case differs or fails. Both versions must run on the same machine: other processors
round differently.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from random_options import Fit, arguments, fit
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

BATCHES = 4
MINE = {
    "config": "quickstart.yaml",
    "model.credit": "Uniform",
    "model.optimizer.lr": "1e-3",
    "model.execution.token_budget": "600",
    "trainer.limit_val_batches": "0",
    "trainer.max_steps": str(2 * BATCHES),
    "evaluation.at_start": "false",
}
METHODS = {
    "GRAIL": "",
    "OARGradient": "",
    "OARPerturbation": "",
    "HighEntropy": "",
    "AdvantageReweighting": "",
    "LESS": "",
    "UCAS": "",
    "RLSD": "",
    "DGPO": "",
    "PRIME": "",
    "AttentionRhythm": "",
    "Resampled": "--model.credit.continuations=2",
    "TreeAdvantage": "",
    "PrefixWeights": "",
    "OptimalBaseline": "",
    "Oracle": "",
    "WarmUp": "--model.credit.inner=GRAIL --model.credit.steps=3",
    "Product": "--model.credit.first=GRAIL --model.credit.second=HighEntropy",
    "PermutedRewards": "--model.credit.inner=TreeAdvantage",
}
CONTROLS = ["Shuffled", "Random", "AnswerOnly", "SameMagnitude", "Balanced"]
TWO_RANKS = "2 --trainer.strategy="
CASES: dict[str, dict[str, str]] = {
    "grpo": {},
    **{name: {"model.credit": f"{name} {options}".strip()} for name, options in METHODS.items()},
    **{name: {"model.credit": "GRAIL", "model.control": name} for name in CONTROLS},
    "own_pass": {"model.credit": "GRAIL --model.credit.saliency.fuse=false"},
    "refreshed": {
        "model.credit": "GRAIL --model.credit.saliency.refresh=update",
        "model.execution.updates_per_batch": "2",
    },
    "whole_rows": {"model.credit": "GRAIL", "model.execution.share_prefixes": "false"},
    "two_passes": {"model.credit": "GRAIL", "model.execution.updates_per_batch": "2"},
    "kl": {"model.objective.kl_coefficient": "0.05", "model.execution.updates_per_batch": "2"},
    "entropy": {"model.credit": "GRAIL", "model.objective.entropy_coefficient": "0.01"},
    "sequence": {"model.objective.level": "sequence", "model.objective.aggregation": "grpo"},
    "cispo": {"model.objective.surrogate": "cispo", "model.objective.scale_rewards": "batch"},
    "distillation": {"model.objective.distillation.coefficient": "0.1"},
    "packing": {"model.credit": "GRAIL", "model.loading.packing": "true", "model.execution.share_prefixes": "false"},
    "checkpointed": {"model.credit": "GRAIL", "model.loading.gradient_checkpointing": "true"},
    "lora": {"model.credit": "GRAIL", "model.loading.lora.rank": "4", "model.objective.kl_coefficient": "0.05"},
    "masters": {"model.credit": "GRAIL", "model.loading.dtype": "bfloat16"},
    "refill": {"model.execution.refill_rounds": "2"},
    "words": {"config": "quickstart_words.yaml", "model.credit": "GRAIL", "data.few_shot.number": "1"},
    "sample_ahead": {
        "model.engine": "tests.elsewhere.Elsewhere",
        "model.execution.sample_ahead": "true",
        "model.execution.sampler_cap": "2",
    },
    "ddp": {"model.credit": "GRAIL", "trainer.devices": f"{TWO_RANKS}ddp"},
    "fsdp2": {"model.credit": "GRAIL", "trainer.devices": f"{TWO_RANKS}ModelParallelStrategy"},
}
RESUMED = ["grpo", "GRAIL", "PRIME", "RLSD", "sample_ahead", "masters"]
CASES |= {f"{name}_resumed": CASES[name] for name in RESUMED}


def run(name: str, folder: Path) -> dict[str, Tensor]:
    """The final weights of a case.

    Raises:
        RuntimeError: If the run does not end well.
    """
    options = MINE | CASES[name]
    # A run that is resumed stops inside its third batch first.
    parts = [{"trainer.max_steps": "5"}, {"ckpt_path": "last"}] if name.endswith("_resumed") else [{}]
    for part in parts:
        made = _on_two_ranks(options, folder) if TWO_RANKS in str(options) else fit(options | part, folder / "run")
        if made.code:
            raise RuntimeError(made.said)
    return made.weights


def _on_two_ranks(options: dict[str, str], folder: Path) -> Fit:
    """The ranks are processes of their own, which start this command again."""
    command = [sys.executable, "-m", "grail_lightning", *arguments(options, folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return Fit(done.returncode, done.stderr[-1500:], {})
    (file,) = (folder / "run").glob("*/checkpoints/last.ckpt")
    if file.is_dir():  # Each rank wrote its shards.
        dcp_to_torch_save(file, file.with_suffix(".pt"))
        file = file.with_suffix(".pt")
    return Fit(0, "", torch.load(file, weights_only=True))


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    differing = 0
    for name in asked.cases:
        file = asked.folder / f"{name}.pt"
        try:
            with tempfile.TemporaryDirectory() as folder:
                weights = run(name, Path(folder))
        except RuntimeError as error:
            print(f"{name}: failed\n{error}", flush=True)
            differing += 1
            continue
        if asked.action == "record":
            torch.save(weights, file)
            print(f"{name}: recorded", flush=True)
            continue
        before = torch.load(file, weights_only=True)
        same = before.keys() == weights.keys() and all(torch.equal(w, weights[n]) for n, w in before.items())
        gap = max((w.double() - weights[n].double()).abs().max().item() for n, w in before.items() if n in weights)
        differing += not same
        print(f"{name}: {'bit for bit the same' if same else f'at most {gap:.2e} apart'}", flush=True)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
