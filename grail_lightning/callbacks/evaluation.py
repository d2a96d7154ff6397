"""The callback that measures accuracy and pass@k on held-out problems before, during and after training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from grail_lightning.batch import Sampling
from grail_lightning.callbacks.evaluated import dataset_facts, evaluated_batches, evaluation_facts, samples_folder
from grail_lightning.callbacks.figures import accuracy_names, figure_names
from grail_lightning.callbacks.hooks import fast_dev_run, module_of, output_of
from grail_lightning.callbacks.judged import tell_policy
from grail_lightning.callbacks.kept_samples import KeptSamples, samples_of
from grail_lightning.callbacks.tally import OF_EACH_DATASET, Tally
from grail_lightning.callbacks.validating import is_over, validate
from grail_lightning.data.names import metric_names
from grail_lightning.evaluation.records import Sample
from grail_lightning.evaluation.table import TableOptions, evaluation_table
from grail_lightning.runtime.collectives import world_size
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.step.outputs import EvaluationPlan, StepOutput, test_seeds, validation_key
from grail_lightning.tasks.base import Prompt

if TYPE_CHECKING:
    from grail_lightning.module import GrailModule


class Evaluation(Callback):
    """Sets how validation and test sample, and logs their results.

    Logs ``val/accuracy``, ``val/pass_at_8``, ``val/<dataset>/accuracy``, ``val/<dataset>/pass_at_8``,
    ``val/completions/mean_length`` (and so on) and the share of each verdict, ``val/verdict/<status>``. `test` logs the
    same metrics under ``test/``. Outside of a fit they are logged at the step of the evaluated policy. The last line of
    a fit shows its first and its last accuracy, which a checkpoint keeps.

    The callback validates once before the first training step. Lightning's own sanity check logs nothing and is
    ignored. The random numbers of training do not depend on validation.

    `test` keeps its samples in ``test/samples`` of the run's folder. A test that was interrupted is continued by the
    same command: what is there is not sampled again, and the table is that of an undisturbed test. An evaluation of
    another model, or of other problems, sampling options or seed, is never continued; it is kept as ``samples.1``.
    Samples are kept if the problems come from a data module of grail_lightning.

    Args:
        num_samples: The number of responses to each problem.
        sampling: The sampling options of these responses; default those of training (`model.sampling`).
        pass_at: The k of each pass@k (unbiased estimate); at most `num_samples`.
        maj_at: The k of each maj@k, a majority vote over k samples (unbiased estimate); at most `num_samples`.
        by: Columns of the data, such as `level` and `subject`, by whose values the figures are shown, too.
        keep_samples: The evaluations that keep their samples: those of `test`, all (the validations of a fit, too, in
            ``validation/step_…/samples``), or none.
        at_start: Whether to validate before training.
        at_end: Whether to validate after the last training step, unless that step has been validated already.

    Raises:
        ValueError: If `num_samples` is not positive, or a k is not between 1 and `num_samples`.
    """

    def __init__(
        self,
        num_samples: int = 1,
        sampling: Sampling | None = None,
        pass_at: tuple[int, ...] = (1,),
        maj_at: tuple[int, ...] = (),
        by: tuple[str, ...] = (),
        keep_samples: Literal["test", "all", "none"] = "test",
        at_start: bool = True,
        at_end: bool = True,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, but got {num_samples}.")
        for name, wanted in (("pass_at", pass_at), ("maj_at", maj_at)):
            if any(not 1 <= k <= num_samples for k in wanted):
                raise ValueError(
                    f"Every k of `{name}` must lie between 1 and `num_samples`, but got {list(wanted)} "
                    f"with {num_samples}. Raise `num_samples`, or ask for a smaller k."
                )
        if keep_samples not in ("test", "all", "none"):
            raise ValueError(f"`keep_samples` must be test, all or none, but got {keep_samples!r}.")
        self.num_samples, self.sampling, self.keep_samples = num_samples, sampling, keep_samples
        self.pass_at, self.maj_at, self.by = tuple(pass_at), tuple(maj_at), tuple(by)
        self.at_start, self.at_end = at_start, at_end
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._finished = False
        self._loaded: int | None = None
        self._step = 0
        self._tally: Tally | None = None
        self._kept: KeptSamples | None = None
        self._counted = 0
        self._first: dict[str, int] = {}

    # --- when -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module the number of samples and the sampling options."""
        module = module_of(pl_module)
        sampling = self.sampling or module.sampling
        module.evaluation = EvaluationPlan(num_samples=self.num_samples, sampling=sampling)
        self._loaded = None
        if stage == "fit":
            self.first, self.last = {}, {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate before training. A resumed run did so when it was started."""
        if self.at_start and trainer.global_step == 0:
            validate(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate after training, before the callbacks that monitor a metric read it."""
        if self.at_end and is_over(trainer) and self.last.get("step") != trainer.global_step:
            validate(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Only a fit that has finished prints its outcome."""
        self._finished = bool(self.last) and trainer.is_global_zero and not fast_dev_run(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the outcome of training, below the messages of other callbacks."""
        self._close()
        if self._finished:
            print(self.outcome())
        self._finished = False

    def outcome(self) -> str:
        """The line ``held-out accuracy: 0.412 -> 0.871 (512 problems, temperature 1.0)``, for example.

        The two figures cannot be compared if the run was resumed with other validation data or sampling options. Each
        figure is then followed by its own conditions.
        """
        last = f"{self.last['accuracy']:.3f} ({self.last['conditions']})"
        if not self.first:
            return f"held-out accuracy: {last}"
        first = f"{self.first['accuracy']:.3f}"
        differ = [
            what
            for key, what in (("digest", "problems"), ("sampling", "sampling"))
            if self.first[key] != self.last[key]
        ]
        if not differ:
            return f"held-out accuracy: {first} -> {last}"
        return (
            f"held-out accuracy: {first} ({self.first['conditions']}) -> {last}; not comparable, because the run was "
            f"resumed with other {' and '.join(differ)}"
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the step of the checkpoint, at which validation and test log."""
        self._loaded = checkpoint["global_step"]

    def logged(self, datasets: Iterable[str]) -> list[str]:
        """The names of the metrics that a validation with these datasets logs."""
        names = figure_names(self.pass_at, self.maj_at)
        parts = [f"{part}/{name}" for part in metric_names(datasets).values() for name in names]
        shown = [part for part in parts if part.partition("/")[2].startswith(OF_EACH_DATASET)]
        if len(parts) > len(names):
            shown += [f"{name}_simple_average" for name in accuracy_names(self.pass_at, self.maj_at)]
        return [*(f"val/{name}" for name in (*names, *shown)), "step"]

    def state_dict(self) -> dict[str, Any]:
        """The first and the last accuracy of the run, with their conditions."""
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the accuracies, so that a resumed run still knows its first one."""
        self.first, self.last = dict(state_dict["first"]), dict(state_dict["last"])

    # --- what -------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the metrics, and open the folder of the samples."""
        fitting = trainer.state.fn == "fit"
        self._step = trainer.global_step if fitting else tell_policy(trainer, pl_module, self._loaded)
        self._tally = Tally(self.pass_at, self.maj_at, self.by, pl_module.device)
        self._counted = 0
        self._close()
        module = module_of(pl_module)
        if trainer.state.fn == "test" or self.keep_samples == "all":
            self._open(trainer, module)
        if module.evaluation is not None:
            done = self._kept.done if self._kept is not None else frozenset()
            module.evaluation = replace(module.evaluation, done=done)

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
        if trainer.sanity_checking:
            return
        assert self._tally is not None
        if self._kept is not None and (dataloader_idx, batch_idx) in self._kept.done:
            assert isinstance(batch, list)
            self._tally.add(self._kept.recalled(dataloader_idx, batch_idx), batch)
            return
        output = output_of(outputs)
        samples = self._samples(trainer, output, batch_idx, dataloader_idx)
        if self._kept is not None:
            self._kept.write(samples)
        self._tally.add(samples, output.batch.prompts)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics."""
        if trainer.sanity_checking:
            return
        figures = self._log(pl_module, "val")
        if trainer.state.fn == "fit":
            self.last = {
                "step": trainer.global_step,
                "accuracy": figures["accuracy"],
                **self._what(module_of(pl_module).evaluation, figures["problems"]),
            }
            if trainer.global_step == 0:
                self.first = self.last
        self._close(complete=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics and print them as a table."""
        assert self._tally is not None
        self._log(pl_module, "test")
        problems = self._tally.gathered()
        if trainer.is_global_zero and problems:
            shown = TableOptions(pass_at=self.pass_at, maj_at=self.maj_at, by=self.by, first=self._first)
            print(evaluation_table(problems, shown))
        self._close(complete=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the files of the samples; what is written stays."""
        if self._kept is not None:
            self._kept.tell_interrupted(exception)
        self._close()

    def _what(self, plan: EvaluationPlan, problems: float) -> dict[str, Any]:
        """The conditions of an accuracy: a text, and values that differ if the problems or the sampling differ."""
        assert self._tally is not None
        temperature = plan.sampling.temperature
        drawn = f"temperature {temperature}" if temperature else "greedy"
        samples = f" x {self.num_samples} samples" if self.num_samples > 1 else ""
        return {
            "conditions": f"{problems:.0f} problems{samples}, {drawn}",
            "digest": self._tally.digest(),
            "sampling": repr(plan),
        }

    def _samples(self, trainer: Trainer, output: StepOutput, batch: int, dataloader: int) -> list[Sample]:
        """The samples of this rank's share of a batch."""
        prompts: list[Prompt] = output.batch.prompts[:: self.num_samples]  # Rows of one group are neighbours.
        rank, ranks = trainer.global_rank, trainer.world_size
        if self._kept is not None:
            indices = [place.number for place in self._kept.batches.of_rank(dataloader, batch, rank, ranks)]
        else:  # Any numbers will do that tell problems apart.
            indices = [(self._counted + number) * ranks + rank for number in range(len(prompts))]
        self._counted += len(prompts)
        if trainer.state.fn == "test":
            seeds = test_seeds(prompts, self.num_samples)
        else:
            seed = derive_seed(run_seed(), *validation_key(dataloader, batch), rank)
            seeds = [seed] * len(output.batch)
        return samples_of(output, indices, seeds, self.num_samples)

    def _log(self, pl_module: LightningModule, stage: str) -> dict[str, float]:
        """Log all metrics and return them. Every rank computes the same metrics in the same order."""
        assert self._tally is not None
        figures = self._tally.compute()
        logged = {f"{stage}/{name}": value for name, value in figures.items() if name != "problems"}
        known = {name: value for name, value in logged.items() if value == value}
        # Without a step Lightning would log at the number of batches, which is 0 outside of a fit.
        pl_module.log_dict(known | {"step": float(self._step)}, batch_size=1, sync_dist=world_size() > 1)
        return figures

    def _open(self, trainer: Trainer, module: GrailModule) -> None:
        """Open the folder of the samples, unless they are not kept or the problems are not known beforehand."""
        batches = None if trainer.sanity_checking else evaluated_batches(trainer)
        self._first = {}
        if batches is None:
            return
        datasets = dataset_facts(trainer, batches)
        self._first = {name: found["first"] for name, found in datasets.items() if found["first"] is not None}
        if self.keep_samples != "none" and not fast_dev_run(trainer):
            shown = {"pass_at": list(self.pass_at), "maj_at": list(self.maj_at), "by": list(self.by)}
            facts = evaluation_facts(trainer, module, batches, self._step) | {"datasets": datasets, "table": shown}
            self._kept = KeptSamples(trainer, samples_folder(trainer), facts, batches)

    def _close(self, *, complete: bool = False) -> None:
        """Close the folder of the samples; a complete evaluation is marked as one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.finish() if complete else kept.close()
