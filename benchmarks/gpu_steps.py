"""The parts `step` and `credit` of gpu_check.py: steps of the real module under the real Trainer."""

from __future__ import annotations

import statistics
from dataclasses import replace

import lightning.pytorch as pl
import torch
from gpu_setting import GROUP, Check, endless, prompts_of
from stand_in import StandInEngine

from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL, Uniform
from grail_lightning.engines import HFEngine
from grail_lightning.module import GrailModule
from grail_lightning.policy import Loading, Policy
from grail_lightning.step.options import Execution


class GivenEngine(StandInEngine):
    """Hands out responses of the full length, half of them right; in the last step it also samples for real.

    Args:
        check: The part.
        repeats: Calls in a row that get the same responses.
        last: The number of the call in which it samples for real; None never does.
        peaks: Gets the memory of that.
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
