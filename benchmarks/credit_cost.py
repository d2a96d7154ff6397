"""The cost of token credit: complete training steps of GRAIL and of GRPO, which alternate in one run.

    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py --case quickstart
    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py --case 34m

The steps are those of the module: sampling, grading, credit, update, optimiser. `quickstart` is the packaged
policy sampling as in configs/quickstart.yaml (same prompts and same random numbers on all sides; the learning rate is 0
so that they stay the same policy). `34m` is a random-weight Qwen3 of 34 million parameters on seeded responses of
256-512 tokens: every group mixed, half of the rows boxed with a negative advantage.

The default sides are GRPO (`Uniform`); GRAIL with its defaults; GRAIL with a separate saliency pass; GRAIL with
`refresh: update`; and GRAIL as in published code: before every optimiser step, with all rows, whole sequences, all
logits and parameter gradients. `--sides` chooses others, such as the methods of the group's prefix tree (`tree`),
PRIME, also with a second forward pass (`PRIME, twice`), or SDPG's loss beside GRPO.
Prints medians, ratios to GRPO with the same number of updates, with and without sampling. `--memory` prints the peak
memory of saliency and of an update instead, one process each.
"""

import argparse
import copy
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from stand_in import StandInEngine, StandInTask, random_qwen3

from grail_lightning.batch import Sampling
from grail_lightning.credit import (
    DGPO,
    GRAIL,
    PRIME,
    AttentionRhythm,
    Needs,
    OptimalBaseline,
    Oracle,
    PrefixWeights,
    Resampled,
    SaliencyOptions,
    TokenCredit,
    TokenWeights,
    TreeAdvantage,
    Uniform,
)
from grail_lightning.data import ArithmeticData
from grail_lightning.engines import HFEngine
from grail_lightning.functional import grail_map
from grail_lightning.module import GrailModule
from grail_lightning.policy.reference import Reference
from grail_lightning.step.options import Distillation, Execution
from grail_lightning.step.second_model import TrainedModel


class Published(TokenCredit):
    """GRAIL's weights, computed as in published code."""

    def needs(self) -> Needs:
        """Weights before every optimiser step."""
        return Needs(refresh="update")

    def __call__(self, policy, batch, context):
        embeds = policy.embed(batch.input_ids)
        embeds.retain_grad()
        logits = policy.model(inputs_embeds=embeds, attention_mask=batch.attention_mask.long(), use_cache=False).logits
        width = batch.response_mask.shape[1]
        chosen = logits[:, -width - 1 : -1].float().log_softmax(-1).gather(-1, batch.response_ids[..., None])
        (-(chosen.squeeze(-1) * batch.answer.whole).sum()).backward()
        scores = (embeds.grad * embeds.detach()).norm(dim=-1)[:, -width - 1 : -1].masked_fill(~batch.response_mask, 0)
        policy.zero_grad(set_to_none=True)
        everything = torch.ones(len(batch), dtype=torch.bool)
        values = grail_map(scores, batch.response_mask)
        return TokenWeights(values=values, fallback=~everything, scores=scores)


CREDITS = {
    "GRPO": Uniform(),
    "GRAIL": GRAIL(),
    "own pass": GRAIL(saliency=SaliencyOptions(fuse=False)),
    "every update": GRAIL(saliency=SaliencyOptions(refresh="update")),
    "published way": Published(),
    "tree": TreeAdvantage(),
    "tree, left out": TreeAdvantage(own_row=False),
    "tree, numbers": TreeAdvantage(state="numbers"),
    "prefix weights": PrefixWeights(),
    "optimal baseline": OptimalBaseline(),
    "oracle": Oracle(),
    "DGPO": DGPO(),
    "rhythm": AttentionRhythm(),
    "resampled": Resampled(),
    "PRIME": PRIME(),
    "PRIME, twice": PRIME(double_forward=True),
    "SDPG": Uniform(),
}
DISTILLATION = {"SDPG": Distillation()}


class SamePairs(HFEngine):
    """Draws the same responses for all sides of one round."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats, self.calls = repeats, 0

    def generate(self, prompts, group_size, sampling, seed):
        self.calls += 1
        return super().generate(prompts, group_size, sampling, (self.calls - 1) // self.repeats)


class Alternate(pl.Callback):
    """Gives the batches to the sides in turn, in a new order every round, and keeps the seconds of the phases."""

    def __init__(self, sides: list[tuple[str, int]], clock) -> None:
        self.sides, self.clock = sides, clock
        self.laps: dict = defaultdict(lambda: defaultdict(list))
        self.eligible: list[float] = []
        self._start = self._sampling = 0.0

    def on_train_start(self, trainer, pl_module):
        generate = pl_module.engine.generate

        def timed(*arguments):
            start = self.clock()
            batch = generate(*arguments)
            self._sampling = self.clock() - start
            return batch

        pl_module.engine.generate = timed

    def _side(self, number: int) -> tuple[str, int]:
        turn, place = divmod(number, len(self.sides))
        return self.sides[(place + turn) % len(self.sides)]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        name, updates = self._side(batch_idx)
        pl_module.credit = CREDITS[name]
        pl_module.objective = replace(pl_module.objective, distillation=DISTILLATION.get(name))
        pl_module.execution = replace(pl_module.execution, updates_per_batch=updates)
        self._start = self.clock()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seconds = self.clock() - self._start
        if batch_idx < len(self.sides):
            return  # The first round warms up.
        laps, metrics = self.laps[self._side(batch_idx)], outputs["output"].metrics
        laps["step"].append(seconds)
        laps["without sampling"].append(seconds - self._sampling)
        for phase in ("sample", "credit", "update"):
            laps[phase].append(metrics[f"time/{phase}"])
        if "credit/eligible" in metrics:
            self.eligible.append(metrics["credit/eligible"])


def build(case: str, repeats: int, mini_batches: int = 1, credits: Iterable = ()) -> tuple[GrailModule, list]:
    """The module, with what the credit methods need beside it, and the prompts of a batch for any number of rounds."""
    # The one that needs the most: a run loads what its first credit method needs.
    credit = max(
        credits, key=lambda method: (method.needs().training is not None, method.needs().reference), default=None
    )

    def still(parameters):
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)

    if case == "quickstart":
        execution, sampling = Execution(group_size=8, mini_batches=mini_batches), Sampling(max_response_length=64)
        (problems,) = ArithmeticData(num_train=512).load("train")
        engine = SamePairs(repeats)
        made = GrailModule("arithmetic", sampling, engine=engine, execution=execution, optimizer=still, credit=credit)
        return made, [problems.prompts[16 * k : 16 * k + 16] for k in range(32)]
    engine = StandInEngine(256, repeats)
    execution, sampling = Execution(group_size=4), Sampling(max_response_length=512)
    made = GrailModule("arithmetic", sampling, engine=engine, execution=execution, optimizer=still)
    made.policy = random_qwen3(hidden=512, layers=8, vocabulary=8192).train()
    if credit is not None and credit.needs().reference:
        made.reference = Reference(copy.deepcopy(made.policy).requires_grad_(False))
    if credit is not None and (training := credit.needs().training) is not None:
        made.credit = credit
        made.second = TrainedModel(copy.deepcopy(made.policy), training, SingleDeviceStrategy("cpu"), 1.0)
    return made, [[StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in (11, 12)]]


def fit(module: GrailModule, batches: list, *callbacks) -> None:
    """Train on given batches with a quiet Trainer."""
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    ).fit(module, loader)  # fmt: skip


def alternate(case: str, rounds: int, sides: list[tuple[str, int]], clock, mini_batches: int) -> None:
    """Run all sides in turn; print their medians and ratios."""
    module, prompts = build(case, len(sides), mini_batches, [CREDITS[name] for name, _ in sides])
    watch = Alternate(sides, clock)
    fit(module, [prompts[k % len(prompts)] for k in range(rounds + 1) for _ in sides], watch)
    size = sum(p.numel() for p in module.policy.parameters()) / 1e6
    eligible = f", eligible rows {statistics.mean(watch.eligible):.2f}" if watch.eligible else ""
    print(f"{size:.1f} M parameters, {rounds} rounds{eligible}")
    print("| side | updates | step, s | sample | credit | update | step / GRPO | without sampling | credit / update |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, updates in sides:
        laps, base = watch.laps[name, updates], watch.laps["GRPO", updates]
        median = {phase: statistics.median(values) for phase, values in laps.items()}
        # Ratios are taken within a round, so that a slow minute of the machine affects both sides.
        whole, bare = (
            statistics.median(a / b for a, b in zip(laps[phase], base[phase], strict=True))
            for phase in ("step", "without sampling")
        )
        cells = " | ".join(f"{median[phase]:.2f}" for phase in ("step", "sample", "credit", "update"))
        share = median["credit"] / median["update"]
        print(f"| {name} | {updates} | {cells} | {whole:.3f} | {bare:.3f} | {share:.2f} |")


def peak(case: str, side: str) -> None:
    """Run one step in this process and print by how many MiB the peak of resident memory rises."""
    module, prompts = build(case, 1)
    before = []

    class Before(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            before.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    if side == "saliency":  # A separate saliency pass without an update.
        module.credit = CREDITS["own pass"]
        module.execution = replace(module.execution, updates_per_batch=1)
        module.take_steps = lambda update: {}
    else:
        module.credit = CREDITS[side]
    fit(module, prompts[:1], Before())
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[0]) / 1024)


def memory(case: str) -> None:
    """Print the peak memory of each side, which runs in its own process."""
    print("| step | peak resident memory over that before it, MiB |\n|---|--:|")
    for side, text in (
        ("saliency", "sampling and a saliency pass of its own, no update"),
        ("GRPO", "GRPO"),
        ("GRAIL", "GRAIL"),
        ("published way", "the published way"),
    ):
        command = [sys.executable, __file__, "--case", case, "--peak", side]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        print(f"| {text} | {float(found):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["quickstart", "34m"], default="quickstart")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mini-batches", type=int, default=1, help="of the quickstart; its config has 2")
    parser.add_argument("--sides", nargs="+", choices=list(CREDITS), default=list(CREDITS)[:5])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu where others use the machine")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", choices=["saliency", *CREDITS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        return peak(options.case, options.peak)
    if options.memory:
        return memory(options.case)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    sides = [(name, updates) for updates in options.updates for name in options.sides]
    return alternate(options.case, options.rounds, sides, clock, options.mini_batches)


if __name__ == "__main__":
    main()
