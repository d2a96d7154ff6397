"""The callback that measures accuracy and pass@k on held-out problems before, during and after training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from grail_lightning.batch import Sampling
from grail_lightning.callbacks.figures import accuracy_names, figure_names
from grail_lightning.callbacks.hooks import fast_dev_run, module_of
from grail_lightning.callbacks.judged import tell_policy
from grail_lightning.callbacks.running_evaluation import RunningEvaluation
from grail_lightning.callbacks.tally import OF_EACH_DATASET
from grail_lightning.callbacks.validating import is_over, validate
from grail_lightning.data.sources import metric_names
from grail_lightning.evaluate.table import TableOptions
from grail_lightning.step.outputs import EvaluationPlan
from grail_lightning.tasks.base import Prompt


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
        self._running: RunningEvaluation | None = None  # None outside of an evaluation, and in the sanity check.

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
        self._end()
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
        """Begin to count, and open the folder of the samples."""
        self._end()
        if trainer.sanity_checking:
            return
        module, stage = module_of(pl_module), trainer.state.fn
        step = trainer.global_step if stage == "fit" else tell_policy(trainer, pl_module, self._loaded)
        keep = self.keep_samples == "all" or (self.keep_samples == "test" and stage == "test")
        shown = TableOptions(pass_at=self.pass_at, maj_at=self.maj_at, by=self.by)
        self._running = RunningEvaluation(trainer, module, shown, step, keep=keep and not fast_dev_run(trainer))
        module.evaluation = replace(module.evaluation, done=self._running.done)

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: list[Prompt],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the graded responses of a batch to the metrics, and keep them."""
        if self._running is not None:
            self._running.add(outputs, batch, batch_idx, dataloader_idx)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics."""
        if self._running is None:
            return
        figures = self._running.log(pl_module, "val")
        if trainer.state.fn == "fit":
            self.last = {
                "step": trainer.global_step,
                "accuracy": figures["accuracy"],
                **self._running.conditions(figures["problems"]),
            }
            if trainer.global_step == 0:
                self.first = self.last
        self._end(complete=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics and print them as a table."""
        if self._running is None:
            return
        self._running.log(pl_module, "test")
        if table := self._running.table():
            print(table)
        self._end(complete=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the files of the samples; what is written stays."""
        if self._running is not None:
            self._running.tell_interrupted(exception)
        self._end()

    def _end(self, *, complete: bool = False) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close(complete=complete)
