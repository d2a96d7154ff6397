"""The callback that warns early, and once, about runs that cannot learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from grail_lightning.app.callbacks.hooks import callbacks_of, data_of, fast_dev_run, module_of, output_of
from grail_lightning.app.callbacks.prompt_checks import check_prompts, unequal_mini_batches
from grail_lightning.core.advantages import BNPO
from grail_lightning.core.credit.service import with_inner
from grail_lightning.core.data.loaders import TrainingLoader
from grail_lightning.core.data.modules import PromptData
from grail_lightning.core.engines.base import RolloutEngine
from grail_lightning.core.functional.advantages import ROUNDING
from grail_lightning.core.policy.capabilities import has_dropout
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.collectives import sum_by_name, world_size
from grail_lightning.core.runtime.files import check_writable
from grail_lightning.core.runtime.run_folder import RunFolder
from grail_lightning.core.step.loss import SAMPLER_GAP
from grail_lightning.core.step.optimizer import explain_stuck_weights

if TYPE_CHECKING:
    from grail_lightning.core.module import GrailModule

_MOST_TIMEOUTS = 0.01  # The largest accepted share of the verdicts of a batch that time out or crash.
_MOST_STUCK = 0.5  # That of the weights that a step as large as the learning rate cannot change.
_MOST_SAMPLER_GAP = 0.1  # The largest accepted mean difference between sampler and trainer, in nats a token.
_BEYOND_ROUNDING = 0.5  # The same, for a sampler with the trainer's own weights: rounding does not reach it.


class Preflight(Callback):
    """Warns once about each problem with which training cannot learn, or can hardly learn, with figures and a remedy.

    It detects groups without a difference in reward, batches without any, responses that never end, a policy without an
    end token, verdicts that time out, a training sampler that differs from the policy (top-p, top-k, or other
    log-probabilities than the trainer's), weights whose precision is too low for the learning rate, a learning rate of
    0, rewards outside the range of BNPO, and dropout where a step compares two policies.

    Before the model is loaded it checks that folders can be written and that the data fit the task and the model, and
    warns of validation problems that are training problems, of problems that a chat template has rendered already, and
    of mini-batches that are not equal parts of a batch.

    Args:
        patience: The number of consecutive batches after which it warns.
    """

    def __init__(self, patience: int = 5) -> None:
        check_option("patience", patience, "[1, inf)")
        self.patience = patience
        self._start()

    def _start(self) -> None:
        self._begun = False
        self._in_a_row: Counter[str] = Counter()  # The consecutive batches with each problem, until now.
        self._statuses: Counter[str] = Counter()  # Of the verdicts of the dead batches.
        self._warned: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check folders, data and the engine before the model is loaded, rather than let a run fail later."""
        check_folders(trainer)
        module, data = module_of(pl_module), data_of(trainer)
        if stage == "fit":
            self._start()
        if isinstance(data, PromptData) and hasattr(module, "encode"):
            check_prompts(trainer, module, data, stage)
            if stage == "fit" and isinstance(loader := data.train_dataloader(), TrainingLoader):
                self._check_mini_batches(len(loader.peek()), module)
        if isinstance(engine := getattr(module, "engine", None), RolloutEngine):  # Are its servers there, say.
            engine.check(module.policy_name, module.loading)
        if stage == "fit" and not trainer.enable_validation and trainer.limit_val_batches:
            rank_zero_info("No dataset for validation: no accuracy is measured, and no best checkpoint is kept.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the sampler, the end token, the gate and dropout."""
        module = module_of(pl_module)
        sampling, objective, steps = module.sampling, module.objective, module.execution.steps_per_batch
        if module.policy is not None and not sampling.stop and not module.policy.reachable_ends:
            ends = ", ".join(map(str, module.policy.end_token_ids)) or "none"
            rank_zero_warn(
                f"No end token is known that the policy can sample (tokenizer and generation config name {ends}), and "
                f"`sampling.stop` is empty: every response has {sampling.max_response_length} tokens and is cut. Set "
                "`eos_token` of the tokenizer, or `sampling.stop` to what follows an answer."
            )
        if sampling.top_p != 1 or sampling.top_k:
            rank_zero_warn(
                f"Training samples with `sampling.top_p` {sampling.top_p} and `sampling.top_k` {sampling.top_k}, but "
                "the loss differentiates the whole distribution. Set them to 1 and 0, unless you reproduce a run that "
                "had them."
            )
        gated = next((part for part in with_inner(module.credit) if getattr(part, "gate", None) == "negative"), None)
        if getattr(module.advantage, "share", 1) == 0 and gated is not None:
            rank_zero_warn(
                f"`advantage.share` 0 leaves no negative advantage if no reward is below 0, so "
                f"`{type(gated).__name__}` reweights nothing. Set its `gate` to all, if it has one, or another share."
            )
        compared = [f"the policy before the {steps} optimiser steps of a batch"] if steps > 1 else []
        compared += ["the reference of the KL term"] if objective.kl_coefficient else []
        compared += ["what `execution.sampler_cap` corrects"] if module.sampler_cap is not None else []
        if compared and module.policy is not None and has_dropout(module.policy):
            rank_zero_warn(
                f"Dropout is on in the update, but {' and '.join(compared)} and the sampler have none: tokens are "
                "clipped or corrected, and the KL is positive, although no weight has moved. Set "
                "`loading.lora.dropout` to 0, or the dropout rates in the model's config (`attention_dropout`, say)."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: list[Prompt], batch_idx: int
    ) -> None:
        """Check the optimiser steps before the first batch. A resumed optimiser has been restored by then."""
        module = module_of(pl_module)
        if module.gradients is None or self._begun:
            return
        self._begun = True
        self._check_mini_batches(len(batch), module)
        _check_steps(trainer.optimizers[0], module.gradients.weights)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Check the metrics of the batch and its verdicts over all ranks."""
        module, output = module_of(pl_module), output_of(outputs)
        figures = output.metrics
        statuses = Counter(verdict.status for verdict in output.batch.verdicts)
        verdicts = sum_by_name({status: float(number) for status, number in statuses.items()})
        self._check_groups(figures, verdicts, train_equal=module.advantage.trains_equal_groups)
        self._check_responses(figures, verdicts, module)
        # A warm-up from 0 has a positive rate after its first step. A batch without a gradient says nothing.
        rates = [figures.get("learning_rate", 1.0), *(group["lr"] for group in trainer.optimizers[0].param_groups)]
        if max(rates) > 0 or figures["grad_norm"] > 0:
            self._report(
                "rate",
                max(rates) <= 0,
                f"The learning rate was 0 in each of the last {self.patience} batches with a gradient (norm now "
                f"{figures.get('grad_norm', 0.0):.3g}). Set `lr` of the optimizer, or look at the factor of the "
                "scheduler.",
                self.patience,
            )
        rewards = output.batch.rewards if isinstance(module.advantage, BNPO) else torch.zeros(0)
        if len(outside := rewards[(rewards < -ROUNDING) | (rewards > 1 + ROUNDING)]):
            self._report(
                "bnpo",
                True,
                f"A reward of {outside[0].item():.3g} lies outside [0, 1], and `model.advantage: BNPO` stops the "
                "run at the first group whose mean does. Scale the rewards to [0, 1], or take `GroupMean`.",
            )
        gap = figures.get(SAMPLER_GAP, 0.0)
        if gap > _BEYOND_ROUNDING and module.policy is not None and not module.engine.copies_weights:
            raise ValueError(
                f"Sampler and trainer differ by {gap:.2g} nats a token in the log-probability of the same tokens "
                f"(`{SAMPLER_GAP}`), with the same weights. {type(module.policy.model).__name__} computes otherwise "
                "from its cache than in one pass, so the run trains on what it did not sample. Take another model, "
                "or an engine with a copy of the weights (vLLM)."
            )
        correct = "" if module.sampler_cap else ", or set `execution.sampler_cap: 2`"
        self._report(
            "sampler",
            gap > _MOST_SAMPLER_GAP,
            f"Sampler and trainer differ by {gap:.2g} nats a token in the log-probability of the same tokens "
            f"(`{SAMPLER_GAP}`). Sample in the precision of training{correct}.",
        )

    def _check_mini_batches(self, groups: int, module: GrailModule) -> None:
        remark = unequal_mini_batches(groups, module.execution, world_size())
        self._report("mini_batches", bool(remark), remark)

    def _report(self, problem: str, now: bool, text: str, patience: int = 1) -> None:
        """Warn once of a problem that has been there in `patience` consecutive batches, this one included."""
        self._in_a_row[problem] = self._in_a_row[problem] + 1 if now else 0
        if self._in_a_row[problem] >= patience and problem not in self._warned:
            self._warned.add(problem)
            rank_zero_warn(text)

    def _check_groups(self, figures: dict[str, float], verdicts: dict[str, float], *, train_equal: bool) -> None:
        unscored = figures.get("rewards/unscored", 0.0) >= 1
        self._report(
            "unscored",
            unscored,
            f"In each of the last {self.patience} batches, no response had a reward: all reward functions returned "
            "None for all of them, so nothing is trained on. Look at the service or the data that they ask.",
            self.patience,
        )
        dead = figures["frac_reward_zero_std"] >= 1 and not train_equal and not unscored
        self._statuses = self._statuses + Counter(verdicts) if dead else Counter()
        total = max(self._statuses.total(), 1)
        shares = ", ".join(f"{number / total:.0%} {status}" for status, number in self._statuses.most_common(3))
        self._report(
            "dead",
            dead,
            f"In each of the last {self.patience} batches, all rollouts of each group earned the same reward (mean "
            f"reward now {figures.get('reward', 0.0):.3g}; verdicts of these batches: {shares}), so every advantage is "
            "0. If verdicts are mixed, raise `sampling.temperature`, or look at the reward function. If answers are "
            "missing, look at the rollouts in TensorBoard: the prompt or `sampling.max_response_length` may be at "
            "fault. If all are wrong or all right, take easier or harder problems, or a larger `execution.group_size`.",
            self.patience,
        )

    def _check_responses(self, figures: dict[str, float], verdicts: dict[str, float], module: GrailModule) -> None:
        left_out = " and left out of the loss (`objective.mask_truncated`)" if module.objective.mask_truncated else ""
        self._report(
            "endless",
            figures["completions/clipped_ratio"] >= 1,
            f"In each of the last {self.patience} batches, every response was cut at the limit of "
            f"{module.sampling.max_response_length} tokens{left_out}. Raise `sampling.max_response_length`; if "
            "responses repeat themselves, lower the learning rate; if the policy never generates its end token "
            f"{module.tokenizer.eos_token!r}, as base models may, set `sampling.stop` to what follows an answer.",
            self.patience,
        )
        total, slow, crashed = sum(verdicts.values()), verdicts.get("timeout", 0.0), verdicts.get("crashed", 0.0)
        self._report(
            "verdicts",
            slow + crashed > _MOST_TIMEOUTS * total,
            f"{slow + crashed:.0f} of the {total:.0f} answers of this batch ({(slow + crashed) / max(total, 1):.1%}) "
            f"could not be graded: {slow:.0f} timed out, {crashed:.0f} crashed. They count as wrong. Is the machine "
            "short of cores or memory? Otherwise look at them: the callback `KeepRollouts` writes the column "
            "`status`. `train/verdict/timeout` and `train/verdict/crashed` are logged for each batch.",
        )


def check_folders(trainer: Trainer) -> None:
    """Check that the run can write to its folder and to those that callbacks name: hours later is too late."""
    folder = RunFolder(trainer).path  # A broadcast: every rank must take part.
    if not trainer.is_global_zero or fast_dev_run(trainer):
        return
    check_writable(folder, "`trainer.logger.save_dir`" if trainer.loggers else "`trainer.default_root_dir`")
    for callback in callbacks_of(trainer):
        for name in ("dirpath", "folder"):
            if directory := getattr(callback, name, None):
                check_writable(Path(directory), f"`{name}` of {type(callback).__name__}")


def _check_steps(optimizer: Optimizer, weights: list[Tensor]) -> None:
    """Check whether steps of the learning rate change the weights."""
    if getattr(optimizer, "bf16_stochastic_round", False):  # torchao
        weights = [w for w in weights if w.dtype != torch.bfloat16]
    # A warm-up starts at 0, so the rate at its end is compared.
    rate = max(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    if (stuck := stuck_share(weights, rate)) > _MOST_STUCK:
        rank_zero_warn(
            f"{stuck:.0%} of the weights cannot take a step of the learning rate {rate:g}: "
            f"{explain_stuck_weights(weights)}"
        )


@torch.no_grad()
def stuck_share(parameters: Iterable[Tensor], learning_rate: float) -> float:
    """The share of the trainable weights that rounding leaves unchanged when the learning rate is added.

    Adam's steps are about as large as the learning rate. About 4,096 weights of each tensor are checked.
    """
    stuck = seen = 0.0
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point() and learning_rate > 0:
            weights = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).flatten()
            sample = weights[:: max(len(weights) // 4096, 1)]
            stuck += (sample + learning_rate == sample).float().mean().nan_to_num().item() * len(weights)
            seen += len(weights)
    return stuck / max(seen, 1)
