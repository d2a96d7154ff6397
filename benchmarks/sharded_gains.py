"""What common prefixes and fused saliency gain with checkpointed blocks and under FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/sharded_gains.py                    # about ten minutes on two cores

Complete updates of the real module, without sampling: GRPO, GRAIL, and GRAIL with a saliency pass of its own, with
common prefixes run once and with every row by itself, in turn. A random-weight Qwen3 of 34 million parameters gets
given responses: 2 prompts × 8 responses of 64-128 tokens on each rank, of which the first `--common` agree within a
group. The settings: one device; one device with checkpointed blocks; two processes with DDP and checkpointed blocks;
two processes with FSDP2, without and with checkpointed blocks.

CPU seconds of rank 0, medians over rounds. The gain is 1 − (shared / apart); the last column but one compares it with
the gain on one device, and the last one compares the shared time with that of a saliency pass of its own (median of the
rounds' ratios).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from stand_in import StandInTask, random_qwen3, stand_in_responses

from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL, SaliencyOptions, Uniform
from grail_lightning.engines import RolloutEngine
from grail_lightning.engines.base import build_batch
from grail_lightning.module import GrailModule
from grail_lightning.policy import Loading
from grail_lightning.step.options import Execution

SETTINGS = ("one device", "checkpointed", "DDP, checkpointed", "FSDP2", "FSDP2, checkpointed")
CREDITS = {"GRPO": Uniform(), "own pass": GRAIL(saliency=SaliencyOptions(fuse=False)), "GRAIL": GRAIL()}
SIDES = [(credit, share) for credit in CREDITS for share in (False, True)]
SHORTEST, LONGEST, GROUP = 64, 128, 8


class Branching(RolloutEngine):
    """Given responses that agree in their first tokens within a group."""

    def __init__(self, common: int) -> None:
        self.common, self.policy = common, None

    def update_weights(self, policy):
        self.policy = policy

    def generate(self, prompts, group_size, sampling, seed):
        lengths = SHORTEST, LONGEST
        made = stand_in_responses(self.policy.tokenizer, len(prompts), group_size, lengths, seed=0)
        made = [made[k - k % group_size][: self.common] + row[self.common :] for k, row in enumerate(made)]
        return build_batch(self.policy, prompts, group_size, made, [True] * len(made))


class Turns(pl.Callback):
    """The sides in turn, and the CPU seconds of their steps."""

    def __init__(self) -> None:
        self.seconds = defaultdict(list)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        turn, place = divmod(batch_idx, len(SIDES))
        self.side = SIDES[(place + turn) % len(SIDES)]
        pl_module.credit = CREDITS[self.side[0]]
        pl_module.execution = replace(pl_module.execution, share_prefixes=self.side[1])
        self.start = time.process_time()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx >= len(SIDES):  # The first round warms up.
            self.seconds[self.side].append(time.process_time() - self.start)


def work(setting: str, folder: str, rounds: int, common: int) -> None:
    """One setting; rank 0 prints the CPU seconds of each side."""
    torch.set_num_threads(1)
    ranks = 2 if setting.startswith(("DDP", "FSDP2")) else 1
    module = GrailModule(
        folder,
        Sampling(max_response_length=LONGEST),
        Loading(gradient_checkpointing="checkpointed" in setting),
        engine=Branching(common),
        execution=Execution(group_size=GROUP, token_budget=1024),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0),
    )
    task = StandInTask()
    prompts = [task.prompt({"problem": f"{k}+{k}+{k}+{k}\n"}) for k in (11, 12)]
    loader = torch.utils.data.DataLoader([prompts] * ((rounds + 1) * len(SIDES)), batch_size=None)
    turns = Turns()
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    strategy = {"DDP": "ddp", "FSDP2": sharded}.get(setting.split(",")[0], "auto")
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=ranks, strategy=strategy, logger=False,
        callbacks=[turns], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print(json.dumps([turns.seconds[side] for side in SIDES]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--common", type=int, default=24, help="tokens with which the responses of a group begin")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting:
        return work(options.setting, options.folder, options.rounds, options.common)
    print(
        "| setting | credit | apart, CPU s | shared | shared / apart | share of the gain on one device | to own pass |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    gains = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = random_qwen3(hidden=512, layers=8, vocabulary=8192)
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        for setting in options.settings:
            command = [sys.executable, str(Path(__file__).resolve()), "--setting", setting, "--folder", folder]
            command += ["--rounds", str(options.rounds), "--common", str(options.common)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found = dict(zip(SIDES, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))
            for credit in CREDITS:
                apart, shared = (statistics.median(found[credit, share]) for share in (False, True))
                gains[setting, credit] = 1 - shared / apart
                kept = gains[setting, credit] / gains[options.settings[0], credit]
                pairs = zip(found[credit, True], found["own pass", True], strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                print(
                    f"| {setting} | {credit} | {apart:.2f} | {shared:.2f} | {shared / apart:.2f} | {kept:.2f} "
                    f"| {ratio:.3f} |",
                    flush=True,
                )
    return None


if __name__ == "__main__":
    main()
