"""The callback that measures accuracy and pass@k on held-out problems before, during and after training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from grail_lightning.answers.records import STATUSES, UNSCORED
from grail_lightning.app.callbacks.hooks import fast_dev_run, module_of, output_of, tell_policy
from grail_lightning.app.callbacks.samples import KeptSamples, check_folder, sample_rows, tested_batches
from grail_lightning.app.results.records import judged, sample_frame, with_votes
from grail_lightning.app.results.table import TableOptions, by_column, evaluation_table, measured
from grail_lightning.core.data.sources import metric_name, metric_names
from grail_lightning.core.records.columns import Row
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import Sampling
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.collectives import all_gather_objects, world_size
from grail_lightning.core.step.figures import EvaluationPlan

if TYPE_CHECKING:
    from grail_lightning.core.module import GrailModule

# What the names of the figures of each dataset begin with; the others are logged for all datasets together.
_OF_EACH_DATASET = ("accuracy", "pass_at", "maj_at", "reward", "completions/mean_length", "completions/clipped_ratio")


class Evaluation(Callback):
    """Sets how validation and test sample, and logs their results.

    Logs ``val/accuracy``, ``val/pass_at_8``, ``val/reward``, the same for each dataset (``val/<dataset>/accuracy``),
    ``val/completions/mean_length`` (and so on) and the share of each verdict, ``val/verdict/<status>``. `test` logs the
    same metrics under ``test/``. Outside of a fit they are logged at the step of the evaluated policy. The last line of
    a fit shows its first and its last accuracy, which a checkpoint keeps.

    The callback validates once before the first training step. Lightning's own sanity check logs nothing and is
    ignored. The random numbers of training do not depend on validation.

    `test` keeps its samples in ``test/samples`` of the run's folder, if the problems come from a data module of
    grail_lightning. A test that was interrupted is continued by the same command: what is there is not sampled again,
    and the table is that of an undisturbed test. One of another model, or of other problems, sampling options or seed,
    is never continued; it is kept as ``samples.1``.

    Args:
        num_samples: The number of responses to each problem.
        sampling: The sampling options of these responses; default those of training (`model.sampling`).
        pass_at: The k of each pass@k (unbiased estimate); at most `num_samples`.
        maj_at: The k of each maj@k, a majority vote over k samples (unbiased estimate); at most `num_samples`.
        by: Columns of the data, such as `level` and `subject`, by whose values the figures are shown, too.
        at_start: Whether to validate before training.
        at_end: Whether to validate after the last training step, unless that step has been validated already.
    """

    def __init__(
        self,
        num_samples: int = 1,
        sampling: Sampling | None = None,
        pass_at: tuple[int, ...] = (1,),
        maj_at: tuple[int, ...] = (),
        by: tuple[str, ...] = (),
        at_start: bool = True,
        at_end: bool = True,
    ) -> None:
        check_option("num_samples", num_samples, "[1, inf)")
        for name, wanted in (("pass_at", pass_at), ("maj_at", maj_at)):
            if any(not 1 <= k <= num_samples for k in wanted):
                raise ValueError(
                    f"Every k of `{name}` must lie between 1 and `num_samples`, but got {list(wanted)} "
                    f"with {num_samples}. Raise `num_samples`, or ask for a smaller k."
                )
        self.num_samples, self.sampling = num_samples, sampling
        self.pass_at, self.maj_at, self.by = tuple(pass_at), tuple(maj_at), tuple(by)
        self.at_start, self.at_end = at_start, at_end
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._running: _Running | None = None  # None outside of an evaluation, and in the sanity check.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module the number of samples and the sampling options."""
        module = module_of(pl_module)
        sampling = self.sampling or module.sampling
        module.evaluation = EvaluationPlan(num_samples=self.num_samples, sampling=sampling)
        if stage == "fit":
            self.first, self.last = {}, {}
        elif stage == "test" and not fast_dev_run(trainer):
            check_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate before training. A resumed run did so when it was started."""
        if self.at_start and trainer.global_step == 0:
            _validate(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Forget the step of the last validation, by which `ModelCheckpoint` would name what it saves from now on."""
        trainer.callback_metrics.pop("step", None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate after training, before the callbacks that monitor a metric read it."""
        steps, epochs = trainer.max_steps, trainer.max_epochs
        last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        over = 0 <= steps <= trainer.global_step or last_epoch or trainer.should_stop
        if self.at_end and over and self.last.get("step") != trainer.global_step:
            _validate(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the outcome of a fit below the messages of other callbacks. An interrupted one has no teardown."""
        self._end()
        if stage == "fit" and self.last and trainer.is_global_zero and not fast_dev_run(trainer):
            print(f"held-out accuracy: {self._outcome()}")

    def _outcome(self) -> str:
        """``0.412 -> 0.871 (512 problems, temperature 1.0)``; not comparable after a resume with other conditions."""
        first, last = (
            f"{figures['accuracy']:.3f} ({figures['conditions']})" if figures else ""
            for figures in (self.first, self.last)
        )
        other = {"digest": "problems", "sampling": "sampling"}
        differ = [what for key, what in other.items() if self.first and self.first[key] != self.last[key]]
        if differ:
            return f"{first} -> {last}; not comparable, because the run was resumed with other {' and '.join(differ)}"
        return f"{self.first['accuracy']:.3f} -> {last}" if self.first else last

    def state_dict(self) -> dict[str, Any]:
        """The first and the last accuracy of the run, with their conditions."""
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the accuracies, so that a resumed run still knows its first one."""
        self.first, self.last = dict(state_dict["first"]), dict(state_dict["last"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count, and open the folder of the samples."""
        self._end()
        if trainer.sanity_checking:
            return
        module, stage = module_of(pl_module), trainer.state.fn
        step = trainer.global_step if stage == "fit" else tell_policy(trainer, pl_module)
        options = TableOptions(pass_at=self.pass_at, maj_at=self.maj_at, by=self.by)
        self._running = _Running(trainer, module, options, step)
        if (samples := self._running.kept) is not None:
            module.evaluation = replace(module.evaluation, done=samples.done)

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the graded responses of a batch to the metrics, and keep them."""
        if self._running is not None:
            self._running.add(outputs, (dataloader_idx, batch_idx))

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics. A test prints them as a table."""
        running = self._running
        if running is None:
            return
        figures = running.log(pl_module, "test" if trainer.testing else "val")
        if trainer.state.fn == "fit":
            self.last = {"step": trainer.global_step, "accuracy": figures["accuracy"]} | running.conditions()
            if trainer.global_step == 0:
                self.first = self.last
        if trainer.testing and trainer.is_global_zero and len(running.samples):
            pl_module.print(evaluation_table(running.samples, running.shown))  # Below the progress bar.
        if running.kept is not None:
            running.kept.finish()  # Until its table stands there, a test is not over: the same command goes on with it.
        self._running = None

    on_test_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the files of the samples; what is written stays."""
        self._end(exception)

    def _end(self, exception: BaseException | None = None) -> None:
        """Close the folder of an evaluation that was broken off."""
        if self._running is not None and self._running.kept is not None:
            self._running.kept.close(exception)
        self._running = None


class _Running:
    """An evaluation from its first batch to its figures: its problems, and the samples that a test keeps.

    Every rank must call the constructor and `log`. `step` is the number of optimiser steps of the policy.
    """

    def __init__(self, trainer: Trainer, module: GrailModule, options: TableOptions, step: int) -> None:
        self._trainer, self._plan, self._step = trainer, module.evaluation, step
        self.shown = options
        self._batches: list[pd.DataFrame] = []  # The samples of this rank.
        self.samples = sample_frame([], self._plan.num_samples)  # In the end those of all ranks.
        self.kept: KeptSamples | None = None
        self._counted = 0
        tests = trainer.state.fn == "test" and not fast_dev_run(trainer)
        if tests and (batches := tested_batches(trainer)) is not None:
            self.shown = replace(options, first=batches.first_rows())
            self.kept = KeptSamples(trainer, module, batches, step, self.shown)
            self._count(self.kept.known(), [loader.prompts[0] for loader in batches.loaders if len(loader.prompts)])

    def add(self, outputs: object, number: tuple[int, int]) -> None:
        """Count the responses of a batch, and keep them. `outputs` are None for one that was counted at the start."""
        if outputs is None:
            return
        batch = output_of(outputs).batch
        prompts = batch.prompts[:: self._plan.num_samples]  # Rows of one group are neighbours.
        samples = sample_rows(batch, self._indices(number, len(prompts)))
        if self.kept is not None:
            self.kept.write(samples)
        self._count(samples, prompts)

    def _count(self, samples: Iterable[Row], prompts: Sequence[Prompt]) -> None:
        """Count samples. `prompts` are some of each dataset, whose tasks say how answers are compared."""
        compare = {prompt.dataset: prompt.task.compare for prompt in prompts}
        self._batches.append(with_votes(sample_frame(samples, self._plan.num_samples), compare))

    def _indices(self, number: tuple[int, int], num_prompts: int) -> list[int]:
        """The places of a batch's problems in their datasets."""
        if self.kept is not None:
            return [index for _, index in self.kept.batches.of_rank(number, self._trainer)]
        rank, ranks = self._trainer.global_rank, self._trainer.world_size
        self._counted += num_prompts  # Any numbers will do that tell problems apart.
        return [k * ranks + rank for k in range(self._counted - num_prompts, self._counted)]

    def log(self, pl_module: LightningModule, stage: str) -> dict[str, float]:
        """Log all figures and return them. A collective: every rank computes the same ones of all problems."""
        ranks = all_gather_objects(self._batches)
        batches = [with_votes(self.samples, {}), *(batch for of_rank in ranks for batch in of_rank)]
        self.samples = pd.concat(batches).sort_values(["dataset", "index", "sample"], ignore_index=True)
        figures = _all_figures(self.samples, self.shown)
        scalars = {f"{stage}/{name}": value for name, value in figures.items() if value == value}
        # Without a step Lightning would log at the number of batches, which is 0 outside of a fit.
        pl_module.log_dict(scalars | {"step": float(self._step)}, batch_size=1, sync_dist=world_size() > 1)
        if len(self.samples) and math.isnan(figures["accuracy"]):
            # `ModelCheckpoint` raises without its figure, and NaN is worse than any number to it.
            pl_module.log(f"{stage}/accuracy", math.nan, logger=False, batch_size=1, sync_dist=world_size() > 1)
        return figures

    def conditions(self) -> dict[str, Any]:
        """The conditions of the figures: a text, and values that differ if the problems or the sampling differ."""
        temperature, number = self._plan.sampling.temperature, self._plan.num_samples
        drawn = f"temperature {temperature}" if temperature else "greedy"
        samples = f" x {number} samples" if number > 1 else ""
        conditions = f"{len(self.samples) // number} problems{samples}, {drawn}"
        problems = self.samples["problem"][self.samples["sample"] == 0]
        digest = sum(int(problem, 16) for problem in problems) % 2**64  # In any order.
        return {"conditions": conditions, "digest": digest, "sampling": repr(self._plan)}


def _all_figures(samples: pd.DataFrame, options: TableOptions) -> dict[str, float]:
    """The figures of an evaluation by name: of all problems, of each dataset, and of the parts of `options.by`."""
    figures = _figures(samples, options)
    averaged = [name for name in figures if name.startswith(("accuracy", "pass_at", "maj_at"))]
    parts = metric_names(name for name in samples["dataset"].unique() if name)
    of_each = [_figures(samples[samples["dataset"] == name], options) for name in parts]
    for part, values in zip(parts.values(), of_each, strict=True):
        figures |= {f"{part}/{name}": value for name, value in values.items() if name.startswith(_OF_EACH_DATASET)}
    if len(parts) > 1:
        figures |= {f"{name}_simple_average": sum(entry[name] for entry in of_each) / len(parts) for name in averaged}
    for column in options.by:
        for dataset, value, rows in by_column(samples, column):
            part, values = f"{metric_name(dataset)}/{metric_name(f'{column}_{value}')}", _figures(rows, options)
            while averaged and f"{part}/{averaged[0]}" in figures:  # A value that differs in punctuation alone.
                part += "_"
            figures |= {f"{part}/{name}": values[name] for name in averaged}
    return figures


def _figures(samples: pd.DataFrame, options: TableOptions) -> dict[str, float]:
    """The figures of a set of problems: means over problems, or over all responses. Every rank has all problems."""
    lengths, metrics = samples["num_tokens"], measured(judged(samples), options.pass_at, options.maj_at)
    right, wrong = samples["correct"], ~samples["correct"] & (samples["status"] != UNSCORED)
    return {
        **{name: float(value) for name, value in metrics.compute().items()},
        "reward": _mean(samples["reward"].dropna()),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": _mean(~samples["finished"]),
        "completions/mean_length_right": _mean(lengths[right]),
        "completions/mean_length_wrong": _mean(lengths[wrong]),
        **{f"verdict/{status}": (samples["status"] == status).sum() / max(1, len(samples)) for status in STATUSES},
    }


def _mean(values: pd.Series) -> float:
    """The mean, which does not depend on the order of the values; NaN without any."""
    return math.fsum(values) / len(values) if len(values) else math.nan


def _validate(trainer: Trainer) -> None:
    """Run Lightning's validation loop outside of its schedule, with all its hooks."""
    if not trainer.enable_validation:
        return
    with isolate_rng():
        trainer.validating = True
        try:
            trainer.fit_loop.epoch_loop.val_loop.run()
        finally:
            trainer.training = True
