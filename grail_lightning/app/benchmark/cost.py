"""What a step of training with a credit method costs beside one with uniform credit.

Steps are those of the module, on the stored rollouts of a world, which stand in for sampling and grading. The learning
rate is 0, so that all steps begin with the same weights. Both sides take turns on the same batches.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from scipy.stats import quantile_test, t
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader

from grail_lightning.app.benchmark.gain import Interval, Told
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, OpenWorld
from grail_lightning.app.benchmark.subjects import Subject
from grail_lightning.core.advantages import GroupMean
from grail_lightning.core.credit.base import TokenCredit, Uniform
from grail_lightning.core.module import GrailModule
from grail_lightning.core.objective import DrGRPO
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import GradedBatch, SampledBatch, Sampling
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.seeds import SeedKey
from grail_lightning.core.step.execution import Execution
from grail_lightning.core.step.sampler import Sampler

TOKEN_BUDGET = 1024  # Of a micro-batch, as in the quickstart.
MOST_ROUNDS = 15
_FEWEST_RANKED = 6  # Ratios from which the order of a median's interval can be read.
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step took."""

    seconds: float
    tokens_run: int  # Places of tokens in forward passes of the policy and of its copies, those of sampling left out.
    sampled_tokens: int  # By the method.
    rollout_tokens: int


@dataclass
class _Counts:
    """What the step under way has run so far."""

    tokens_run: int = 0
    sampled_tokens: int = 0
    sampling: bool = False

    def begin(self) -> None:
        """Begin another step."""
        self.tokens_run = self.sampled_tokens = 0

    @contextmanager
    def of(self, policy: Policy) -> Iterator[None]:
        """A context in which forward passes of the policy's decoder, and of others of its class, are counted."""
        kind = type(policy.decoder)

        def count(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(module, kind) and not self.sampling:
                self.tokens_run += math.prod(output.last_hidden_state.shape[:2])

        hook = register_module_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()


@dataclass(frozen=True, kw_only=True)
class _StoredSampler(Sampler):
    """A sampler whose rollouts are stored ones; what a method samples beside them is sampled, and counted."""

    rollouts: Mapping[int, GradedBatch]  # By the identity of their first prompt.
    counts: _Counts

    def __call__(self, prompts: list[Prompt], key: SeedKey | list[int]) -> GradedBatch:
        """The stored rollouts of these prompts."""
        return self.rollouts[id(prompts[0])]

    def responses(
        self, prompts: Sequence[Prompt], number: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `Sampler`."""
        self.counts.sampling = True
        batch = super().responses(prompts, number, sampling, seeds)
        self.counts.sampling = False
        self.counts.sampled_tokens += int(batch.response_mask.sum())
        return batch


class _StoredModule(GrailModule):
    """The module of training, with stored rollouts in place of sampled ones."""

    def __init__(self, opened: OpenWorld, side: Subject) -> None:
        super().__init__(
            opened.world.policy,
            opened.world.sampling,
            objective=DrGRPO(clip_high=0.28, mask_truncated=True),
            execution=Execution(group_size=GROUP_SIZE, token_budget=TOKEN_BUDGET),
            credit=cast(TokenCredit, side.method),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0),
        )
        self.policy = copy.deepcopy(opened.policy).train()  # It knows the tokens of stored pictures.
        self.batches = opened.batches
        self.counts = _Counts()

    def take(self, side: Subject) -> None:
        """Train with the parts of a side from now on."""
        self.credit, self.control, self.advantage = cast(TokenCredit, side.method), side.control, side.advantage

    def _sampler(self, clock: PhaseClock, group_size: int, sampling: Sampling) -> Sampler:
        usual = super()._sampler(clock, group_size, sampling)
        parts = {part.name: getattr(usual, part.name) for part in fields(usual)}
        stored = {id(batch.prompts[0]): batch for batch in self.batches}
        return _StoredSampler(**parts, rollouts=stored, counts=self.counts)


@dataclass
class _Alternate(pl.Callback):
    """Gives each batch to both sides, in a new order every round, and measures their steps.

    The first round warms up; behind the last one the memory of a step of each side is measured.
    """

    sides: Sequence[Subject]
    rounds: int
    seconds: float
    steps: list[list[Step]] = field(default_factory=list)  # Of each round, by the side.
    peaks: dict[int, float] = field(default_factory=dict)  # MiB by the side.

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self._profiler: Any = None
        self._first, self._ending = _working_seconds(), False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Choose the side."""
        turn, place = divmod(batch_idx, 2)
        self._side = (turn + place) % 2
        pl_module.take(self.sides[self._side])
        pl_module.counts.begin()
        if self._ending:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            )
            self._profiler.start()
        self._start = _working_seconds()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the figures of the step; the time decides whether another round follows."""
        seconds, counts = _working_seconds() - self._start, pl_module.counts
        if self._profiler is not None:
            self._profiler.stop()
            self.peaks[self._side] = peak_mib(self._profiler)
            trainer.should_stop = len(self.peaks) == 2
            return
        if batch_idx >= 2:
            step = Step(
                seconds=seconds,
                tokens_run=counts.tokens_run,
                sampled_tokens=counts.sampled_tokens,
                rollout_tokens=int(outputs["output"].batch.response_mask.sum()),
            )
            if batch_idx % 2 == 0:
                self.steps.append([step, step])
            self.steps[-1][self._side] = step
        spent = _working_seconds() - self._first
        if batch_idx % 2 and (len(self.steps) >= self.rounds or (len(self.steps) >= 2 and spent > self.seconds)):
            self._ending = True
            # A profile of a step that samples has too many events.
            trainer.should_stop = any(ours.sampled_tokens for _, ours in self.steps)


def _working_seconds() -> float:
    """A clock of this thread that stands still while the thread waits for a processor, where the kernel counts that.

    So it counts what other processes work for this one, such as programs that are run, but not other work of the
    machine.
    """
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - waited / 1e9


def peak_mib(profiler: Any) -> float:
    """The most memory, in MiB, that tensors had at one time beyond that at the start of a profile on the CPU.

    PyTorch reports each block that it allocates or frees; what other libraries allocate is not in it.
    """
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    blocks = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(0, *np.cumsum(blocks).tolist()) / _MIB if blocks else 0.0


# --- figures ----------------------------------------------------------------------------------------------------------


def cost_of(opened: OpenWorld, subject: Subject, *, seconds: float = 12.0, rounds: int = MOST_ROUNDS) -> Told:
    """The cost of a step with a method: the key `cost` of a result.

    - `step`: its time over that of a step with uniform credit, sampling and grading left out: the median over rounds.
    - `forward_passes`: the tokens that forward passes run beyond those of uniform's step, over the latter.
    - `extra_tokens`: the tokens that the method samples for each token of the rollouts.
    - `memory_mib`: the peak of the tensors of a step less that of uniform's, and the weights of further models; None
      for a method that samples.

    Args:
        opened: The world.
        subject: The method, no scorer, with its control and estimator.
        seconds: After so many seconds no further round begins, but there are at least two.
        rounds: Most rounds.
    """
    subject = replace(subject, method=copy.deepcopy(subject.method))  # It may have a state.
    sides = (Subject(name="Uniform", method=Uniform(), advantage=GroupMean()), subject)
    watch = _Alternate(sides=sides, rounds=rounds, seconds=seconds)
    module = _StoredModule(opened, subject)
    rollouts = [opened.batches[k % len(opened.batches)] for k in range(rounds + 2) for _ in sides]
    prompts = [batch.prompts[::GROUP_SIZE] for batch in rollouts]
    assert module.policy is not None
    with _silent(), module.counts.of(module.policy):
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=[watch],
        )  # fmt: skip
        trainer.fit(module, DataLoader(cast(Any, prompts), batch_size=None))
    rows = [(ours, base) for base, ours in watch.steps]
    told = Told()
    ratios = [ours.seconds / base.seconds for ours, base in rows]
    base_tokens = sum(base.tokens_run for _, base in rows)
    models = [
        value
        for service in module.services.opened("fit").values()
        for value in vars(service).values()
        if isinstance(value, Policy) and value is not module.policy
    ]
    weights = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
    told.figures["cost"] = {
        "step": median_interval(ratios),
        "forward_passes": sum(ours.tokens_run for ours, _ in rows) / base_tokens - 1 if base_tokens else None,
        "extra_tokens": sum(ours.sampled_tokens for ours, _ in rows) / sum(ours.rollout_tokens for ours, _ in rows),
        "memory_mib": watch.peaks[1] - watch.peaks[0] + weights / _MIB if watch.peaks else None,
    }
    if not watch.peaks:
        told.reasons["cost.memory_mib"] = "The memory of a step is not measured for methods that sample."
    if not base_tokens:
        told.reasons["cost.forward_passes"] = "No group of these rollouts has both outcomes, so nothing is trained."
    return told


@contextmanager
def _silent() -> Iterator[None]:
    """A context in which Lightning says nothing of the run and of its data, which are no user's."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        logger.setLevel(level)


def median_interval(ratios: Sequence[float]) -> Interval:
    """The median of positive ratios with its 95 % interval.

    From six ratios on it is that of the order statistics (`scipy.stats.quantile_test`); of fewer, Student's of the mean
    logarithm, whose estimate is then told.
    """
    if len(ratios) >= _FEWEST_RANKED:
        limits = quantile_test(ratios, p=0.5).confidence_interval(0.95)
        return [float(np.median(ratios)), float(limits.low), float(limits.high)]
    logarithms = np.log(ratios)
    half = float(t.ppf(0.975, len(ratios) - 1) * logarithms.std(ddof=1) / math.sqrt(len(ratios)))
    return [math.exp(logarithms.mean() + shift) for shift in (0, -half, half)]
