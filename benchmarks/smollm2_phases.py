"""Seconds of each phase of a training step of SmolLM2-135M, by this version of the package and by earlier ones.

    git worktree add /tmp/step e7994fb         # before a step became a package of its own
    git worktree add /tmp/smollm2 c659c51      # before configs/smollm2.yaml
    OMP_NUM_THREADS=1 python benchmarks/smollm2_phases.py --policy FOLDER --before /tmp/step /tmp/smollm2

All versions get the same prompts, 8 a batch with 8 responses each: problems of configs/smollm2.yaml behind three worked
examples, here with the sentence that asks for the form of the answer, and without a curriculum. Response limit, token
budget and mini-batches are those of the config. Earlier versions cannot grade that form of an answer, so that a
response is rewarded by the parity of its number of characters: nearly every group has two rewards.
Without boxed answers GRAIL has nothing to do, so that the method is GRPO. The sides take turns, each in a process of
its own; a process warms up with one batch. Prints medians over all batches, and the peak resident memory of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS = 8
PHASES = ("sample", "grade", "credit", "update", "whole step")


def conversations(batches: int) -> list[list[dict[str, str]]]:
    """The conversations of some training problems of the kind of configs/smollm2.yaml."""
    from grail_lightning.data import FewShot, WordProblemData
    from grail_lightning.tasks.words import WordProblemSpace

    data = WordProblemData(
        num_train=PROMPTS * batches, problems=WordProblemSpace(max_steps=2, largest=10), few_shot=FewShot(number=3)
    )
    data.setup("fit")
    prompts = [prompt for batch in data.train_dataloader() for prompt in batch]
    return [prompt.messages for prompt in prompts]


def measure(folder: str, file: Path) -> None:
    """Train on the conversations in a file with the package that can be imported; print a line of figures a batch."""
    warnings.filterwarnings("ignore")
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from grail_lightning import GrailModule

    flat = {"group_size": 8, "mini_batches": 2, "token_budget": 1024}
    try:  # Versions before there were two groups of options.
        from grail_lightning.objective import Objective
        from grail_lightning.rollout import Prompt, Sampling

        options = {"objective": Objective(**flat)}
    except ImportError:
        from grail_lightning.batch import Sampling
        from grail_lightning.step.options import Execution
        from grail_lightning.tasks.base import Prompt

        options = {"execution": Execution(**flat)}
    from grail_lightning.tasks import MathTask

    class Parity(MathTask):
        """Rewards responses with an even number of characters."""

        def reward(self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[Any]) -> list[float]:
            return [float(len(text) % 2 == 0) for text in texts]

    class Figures(pl.Callback):
        """Prints the seconds of the phases of each batch, and the tokens of its responses."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Mapping[str, Any], *others: Any) -> None:
            batch, figures = outputs["output"].batch, outputs["output"].metrics
            seconds = {phase: figures.get(f"time/{phase}", 0.0) for phase in PHASES[:-1]}
            seconds["whole step"] = sum(seconds.values())
            print(json.dumps(seconds | {"tokens": int(batch.response_mask.sum())}), flush=True)

    pl.seed_everything(0, verbose=False)
    task = Parity()
    prompts = [Prompt(messages=messages, reference="0", task=task) for messages in json.loads(file.read_text())]
    module = GrailModule(
        folder,
        sampling=Sampling(max_response_length=40),
        **options,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0),
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Figures()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(prompts, batch_size=PROMPTS, collate_fn=list))
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def run(tree: Path, folder: str, file: Path) -> tuple[list[dict[str, float]], float]:
    """The figures of all batches but the first, and the peak in MiB, of a version in a process of its own."""
    command = [sys.executable, __file__, "--policy", folder, "--measure", str(file)]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree, check=False)
    if done.returncode:
        raise SystemExit(f"{tree} failed:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows[1:-1], rows[-1]["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="a folder with SmolLM2-135M-Instruct")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="working trees of earlier versions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, default=4, help="batches of a process, the first of which warms up")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure is not None:
        measure(chosen.policy, chosen.measure)
        return
    sides = {tree.name: tree for tree in chosen.before} | {"now": ROOT}
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "conversations.json")
        file.write_text(json.dumps(conversations(chosen.batches)))
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        peaks: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(chosen.rounds):
            for side, tree in sides.items():
                rows, peak = run(tree.resolve(), chosen.policy, file)
                found[side] += rows
                peaks[side].append(peak)
    heading = f"medians of {len(found['now'])} batches"
    print(f"{heading:24}", *(f"{side:>10}" for side in sides))
    for name in (*PHASES, "tokens", "peak, MiB"):
        values = [
            statistics.median(peaks[side] if name == "peak, MiB" else [row[name] for row in found[side]])
            for side in sides
        ]
        print(f"{name:24}", *(f"{value:10.2f}" for value in values))


if __name__ == "__main__":
    main()
