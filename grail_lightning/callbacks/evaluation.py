"""The callback that measures accuracy and pass@k on held-out problems before, during and after training."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from grail_lightning.batch import Sampling
from grail_lightning.callbacks.figures import Figures, figure_names, test_table
from grail_lightning.callbacks.hooks import fast_dev_run, module_of, output_of
from grail_lightning.callbacks.judged import tell_policy
from grail_lightning.data.names import metric_names
from grail_lightning.runtime.collectives import all_gather_objects, all_gather_rows, sum_by_name, world_size
from grail_lightning.step.outputs import EvaluationPlan, StepOutput
from grail_lightning.tasks.base import Prompt

# What the names of the figures of each dataset begin with; the others are logged for all datasets together.
_OF_EACH_DATASET = ("accuracy", "pass_at", "completions/mean_length", "completions/clipped_ratio")


class Evaluation(Callback):
    """Sets how validation and test sample, and logs their results.

    Logs ``val/accuracy``, ``val/pass_at_8``, ``val/<dataset>/accuracy``, ``val/<dataset>/pass_at_8``,
    ``val/completions/mean_length`` (and so on) and the share of each verdict, ``val/verdict/<status>``. `test` logs the
    same metrics under ``test/``. Outside of a fit they are logged at the step of the evaluated policy. The last line of
    a fit shows its first and its last accuracy, which a checkpoint keeps.

    The callback validates once before the first training step. Lightning's own sanity check logs nothing and is
    ignored. The random numbers of training do not depend on validation.

    Args:
        num_samples: The number of responses to each problem.
        sampling: The sampling options of these responses; default those of training (`model.sampling`).
        pass_at: The k of each pass@k (unbiased estimate); at most `num_samples`.
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
        at_start: bool = True,
        at_end: bool = True,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, but got {num_samples}.")
        if any(not 1 <= k <= num_samples for k in pass_at):
            raise ValueError(
                f"Every k of `pass_at` must lie between 1 and `num_samples`, but got {list(pass_at)} "
                f"with {num_samples}. Raise `num_samples`, or ask for a smaller k."
            )
        self.num_samples, self.sampling, self.pass_at = num_samples, sampling, tuple(pass_at)
        self.at_start, self.at_end = at_start, at_end
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._finished = False
        self._loaded: int | None = None
        self._step = 0
        self._figures: dict[str, Figures] = {}
        self._correct: dict[str, list[Tensor]] = defaultdict(list)
        self._digests = 0

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
            _validate(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate after training, before the callbacks that monitor a metric read it."""
        if self.at_end and _is_over(trainer) and self.last.get("step") != trainer.global_step:
            _validate(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Only a fit that has finished prints its outcome."""
        self._finished = bool(self.last) and trainer.is_global_zero and not fast_dev_run(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the outcome of training, below the messages of other callbacks."""
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
        names = figure_names(self.pass_at)
        parts = [f"{part}/{name}" for part in metric_names(datasets).values() for name in names]
        shown = [part for part in parts if part.partition("/")[2].startswith(_OF_EACH_DATASET)]
        return [*(f"val/{name}" for name in (*names, *shown)), "step"]

    def state_dict(self) -> dict[str, Any]:
        """The first and the last accuracy of the run, with their conditions."""
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the accuracies, so that a resumed run still knows its first one."""
        self.first, self.last = dict(state_dict["first"]), dict(state_dict["last"])

    # --- what -------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the metrics."""
        fitting = trainer.state.fn == "fit"
        self._step = trainer.global_step if fitting else tell_policy(trainer, pl_module, self._loaded)
        self._figures = {"": Figures(self.pass_at, pl_module.device)}
        self._correct.clear()
        self._digests = 0

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
        """Add the graded responses of a batch to the metrics."""
        if not trainer.sanity_checking:
            self._take(output_of(outputs), pl_module.device)

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

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics and print them as a table."""
        self._log(pl_module, "test")
        correct = {name: all_gather_rows(self._matrix(name)).cpu() for name in self._datasets() or [""]}
        if trainer.is_global_zero and all(len(right) for right in correct.values()):
            print(test_table({name or "all": right for name, right in correct.items()}, self.pass_at))

    def _what(self, plan: EvaluationPlan, problems: float) -> dict[str, Any]:
        """The conditions of an accuracy: a text, and values that differ if the problems or the sampling differ."""
        temperature = plan.sampling.temperature
        drawn = f"temperature {temperature}" if temperature else "greedy"
        samples = f" x {self.num_samples} samples" if self.num_samples > 1 else ""
        return {
            "conditions": f"{problems:.0f} problems{samples}, {drawn}",
            "digest": int(sum_by_name({"digest": self._digests})["digest"]) % 2**64,
            "sampling": repr(plan),
        }

    def _take(self, output: StepOutput, device: torch.device) -> None:
        batch = output.batch
        self._digests += sum(map(_digest, batch.prompts[:: self.num_samples]))  # rows of one group are neighbours
        rows_of: dict[str, list[int]] = defaultdict(list)
        for row, prompt in enumerate(batch.prompts):
            rows_of[prompt.dataset].append(row)
        parts = {name: rows for name, rows in rows_of.items() if name} | {"": list(range(len(batch)))}
        for name, rows in parts.items():
            at = torch.tensor(rows, dtype=torch.long, device=batch.correct.device)
            self._figures.setdefault(name, Figures(self.pass_at, device)).update(
                batch.correct[at],
                batch.group[at],
                batch.response_lengths[at],
                batch.finished[at],
                [output.batch.verdicts[row].status for row in rows],
            )
        for name, rows in rows_of.items():
            # Rows of one group are neighbours.
            self._correct[name].append(batch.correct[rows].reshape(-1, self.num_samples))

    def _matrix(self, name: str) -> Tensor:
        """Which samples of this rank are correct, ``[N, n]`` bool."""
        return torch.cat([torch.zeros(0, self.num_samples, dtype=torch.bool), *(c.cpu() for c in self._correct[name])])

    def _datasets(self) -> list[str]:
        """The sorted names of the datasets that any rank has evaluated; the same list on every rank."""
        return sorted(_union({name for name in self._figures if name}))

    def _log(self, pl_module: LightningModule, stage: str) -> dict[str, float]:
        """Log all metrics and return the overall ones. Every rank computes the same metrics in the same order."""
        overall = self._figures[""].compute()
        logged = {f"{stage}/{name}": value for name, value in overall.items() if name != "problems"}
        for dataset, part in metric_names(self._datasets()).items():
            figures = self._figures.get(dataset) or Figures(self.pass_at, pl_module.device)
            found = {name: value for name, value in figures.compute().items() if name.startswith(_OF_EACH_DATASET)}
            logged |= {f"{stage}/{part}/{name}": value for name, value in found.items()}
        kept = {name: value for name, value in logged.items() if value == value}
        # Without a step Lightning would log at the number of batches, which is 0 outside of a fit.
        axis = {"step": float(self._step)}
        pl_module.log_dict(kept | axis, batch_size=1, sync_dist=world_size() > 1)
        return overall


def _digest(prompt: Prompt) -> int:
    """A hash of a problem. The sum of hashes identifies a set of problems, in any order and over any ranks."""
    text = repr((prompt.dataset, prompt.messages, prompt.reference))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())


def _union(names: set[str]) -> set[str]:
    """The union of a set of names over all ranks."""
    return set().union(*all_gather_objects(names))


def _is_over(trainer: Trainer) -> bool:
    steps, epochs = trainer.max_steps, trainer.max_epochs
    last_step = 0 <= steps <= trainer.global_step
    last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    return last_step or last_epoch or trainer.should_stop


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
