"""The LightningModule with its hooks. `grail_lightning.core.step` contains the parts of a training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from grail_lightning.core.advantages import AdvantageEstimator
from grail_lightning.core.credit.base import CreditContext, CreditControl, TokenCredit, TokenWeights, Uniform
from grail_lightning.core.credit.service import RunParts, Services, check_services
from grail_lightning.core.distributed.gradients import Gradients
from grail_lightning.core.distributed.sharding import check_strategy, load_on_ranks
from grail_lightning.core.engines.base import RolloutEngine, given_batch
from grail_lightning.core.engines.checks import check_draws, check_logprobs, check_takes_pictures
from grail_lightning.core.objective import DrGRPO, Objective, checked, described
from grail_lightning.core.policy.encode import encode_prompt
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import (
    Loading,
    PolicySource,
    as_source,
    check_dtype,
    check_policy,
    check_precision,
    context_length,
    load_tokenizer,
)
from grail_lightning.core.policy.vision import PictureTokens, load_pictures
from grail_lightning.core.policy.weights import rotary_frequencies_kept
from grail_lightning.core.records.picture import Messages, pictures_in
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch, Sampling
from grail_lightning.core.rollout.grading import TaskVerifiers, grade_and_locate
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.collectives import all_reduce, world_size
from grail_lightning.core.runtime.hooks import GuardedModule, adapt_trainer
from grail_lightning.core.runtime.run_folder import check_last_found
from grail_lightning.core.runtime.seeds import SeedKey, derive_seed, run_seed, seeded
from grail_lightning.core.step import assign
from grail_lightning.core.step.collect import Ahead, check_engine, collect
from grail_lightning.core.step.execution import Execution, resolve_cap
from grail_lightning.core.step.figures import EvaluationPlan, StepOutput, batch_figures, tag, warn_of_limits
from grail_lightning.core.step.optimizer import ConfiguredOptions, check_optimizer, take_step
from grail_lightning.core.step.sampler import Sampler
from grail_lightning.core.step.schedule import advance, check_schedule
from grail_lightning.core.step.update import Update

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    PolicyLike = str | tuple[PreTrainedModel, PreTrainedTokenizerBase]
else:  # What YAML can say.
    PolicyLike = str


class GrailModule(GuardedModule):
    """Trains a policy by reinforcement learning with verifiable rewards and token-level credit.

    Args:
        policy: A model on the hub, a folder in Hugging Face format, or a packaged one: `arithmetic`, `chains`,
            `long_chains`, `numbers`, `words`, `search`, `code`, `charts`. From Python also a loaded model with its
            tokenizer, ``(model, tokenizer)``: a copy of it is trained.
        sampling: Options with which training responses are sampled.
        loading: Options with which the policy is loaded.
        engine: The rollout engine that samples; default `HFEngine`.
        objective: The algorithm: GRPO, DrGRPO (the default), DAPO, CISPO, GSPOToken, SDPG, or a class of your own.
        execution: Options that define how a training step is run: group size, iterations, mini-batches, token budget.
        advantage: The estimator of the advantage of a rollout; default the algorithm's own, such as `GroupMean`.
        credit: The credit method: Uniform (no token credit), GRAIL, or a class of your own by its import path.
        control: A control experiment around the credit: Shuffled, Random, AnswerOnly, SameMagnitude or Balanced.
        optimizer: The optimiser of the policy's trainable parameters. `torchao.optim.AdamW8bit` keeps its state in 8
            bits.
        scheduler: The learning-rate schedule, which counts optimiser steps.

    Raises:
        ValueError: If the policy cannot be found or cannot be loaded with these options.
    """

    def __init__(
        self,
        policy: PolicyLike,
        sampling: Sampling,
        loading: Loading = Loading(),  # noqa: B008  (frozen)
        engine: RolloutEngine | None = None,
        objective: Objective | None = None,
        execution: Execution = Execution(),  # noqa: B008  (frozen)
        advantage: AdvantageEstimator | None = None,
        credit: TokenCredit | None = None,
        control: CreditControl | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        source: PolicySource = as_source(policy)
        check_policy(source, loading, sampling.max_response_length)
        self.policy_name, self.loading, self.sampling = source, loading, sampling
        if engine is None:
            from grail_lightning.core.engines.hf.engine import HFEngine

            engine = HFEngine()
        self.engine, self.credit, self.control = engine, credit or Uniform(), control
        self.objective = checked(objective or DrGRPO())
        self.advantage = advantage or self.objective.advantage()
        check_engine(self.engine, execution, self.objective, self.advantage, self.credit, control)
        assign.check_credit(advantage, self.credit)
        check_optimizer(optimizer, scheduler)
        check_services([self.objective, self.advantage, self.credit], source, loading)
        self.sampler_cap = resolve_cap(execution.sampler_cap, self.engine.copies_weights)
        self.execution, self.optimizer, self.scheduler = execution, optimizer, scheduler
        self.policy: Policy | None = None
        self.gradients: Gradients | None = None
        self.services, self.verifiers, self.ahead = Services(), TaskVerifiers(), Ahead()
        self.evaluation = EvaluationPlan(num_samples=1, sampling=sampling)
        self._limits_warned: set[str] = set()  # The limits of episodes that a warning has named.
        self._moved = False  # Whether a step with a gradient and a learning rate has been taken.
        self.steps_cut = 0  # The number of the last batch's steps that `max_steps` has left out.
        self.schedule_failed: ValueError | None = None  # It ends the run after the batch.
        self._configured: ConfiguredOptions | None = None
        self._restored: dict[str, torch.Tensor] = {}  # Weights of the checkpoint of a resumed fit, for exact masters.
        self.weights_step = 0  # The optimiser steps behind the weights, which only a Trainer that fits knows.

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, which is available before the weights are loaded."""
        return load_tokenizer(self.policy_name, self.loading.trust_remote_code)

    @cached_property
    def pictures(self) -> PictureTokens | None:
        """The picture tokens that the policies of the run share; None for a policy of text."""
        return load_pictures(self.policy_name, self.tokenizer, self.loading.trust_remote_code)

    def encode(self, messages: Messages | str) -> list[int]:
        """The token ids of a prompt, by the chat template if there is one; a token of a picture has its place's id."""
        if pictures_in(messages):
            check_takes_pictures(self.engine, self.loading, world_size())
        return encode_prompt(self.tokenizer, messages, self.loading.chat_template_kwargs, self.pictures)

    def prompt_encoder(self, task: Any) -> Callable[[Messages | str], list[int]]:
        """What encodes the prompts of a task: with what declares its tools, if it has an environment."""
        if not task.has_environment:
            return self.encode
        encode: Callable[[Messages | str], list[int]]
        encode = task.dialect(self.tokenizer, self.encode, self.loading.chat_template_kwargs, self.pictures).prompt_ids
        return encode

    @property
    def context_length(self) -> int | None:
        """The tokens that model and engine have room for, prompt and response together; None if that is not known."""
        return min(filter(None, (context_length(self.policy_name, self.loading), self.engine.room)), default=None)

    # --- setting up ---------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy, and open the services of the run. The strategy calls this when a run begins."""
        fits, half = self.trainer.state.fn == "fit", "16" in str(self.trainer.precision)
        load = partial(load_on_ranks, loading=self.loading, mesh=self.device_mesh, half_precision=half)
        load = partial(load, pictures=self.pictures, running=self.trainer.precision_plugin.forward_context)
        if fits:
            check_logprobs(self.engine, self.sampler_cap, reports=self.engine.reports_logprobs)
        if self.policy is None:
            check_precision(self.trainer.precision, (self.policy_name, self.loading) if self.device_mesh else None)
            check_strategy(self.trainer.strategy)
            if fits:
                check_dtype(self.policy_name, self.loading)
            self.policy = load(self.policy_name, trainable=True)
        parts = RunParts(
            policy=self.policy,
            source=self.policy_name,
            loading=self.loading,
            load_model=load,
            sampler=lambda: self._sampler(PhaseClock(self.device), self.execution.group_size, self.sampling),
            step=lambda: self._trained_steps,
            strategy=self.trainer.strategy,
            max_grad_norm=self.execution.max_grad_norm,
        )
        users: dict[str, list[Any]] = {"fit": [self.objective, self.advantage, self.credit], "predict": [self.credit]}
        self.services.open(self._stage, users.get(self._stage, []), parts)

    def setup(self, stage: str) -> None:
        """Forget the verdicts of an earlier run, time-outs among them, and what an earlier fit has left."""
        check_last_found(self.trainer)
        task = getattr(getattr(self.trainer, "datamodule", None), "task", None)
        if task is not None and task.has_environment:  # A wrong chat template is refused before weights are loaded.
            if task.tools.show_pictures:
                check_takes_pictures(self.engine, self.loading, world_size())
            self.prompt_encoder(task)
        self.verifiers = TaskVerifiers()
        if self.policy is not None and self.policy.vision is not None:
            self.policy.vision.forget()  # A checkpoint may follow.
        if stage == "fit" and self._configured is not None:  # By an earlier fit.
            self.steps_cut, self.schedule_failed = 0, None
            self.on_load_checkpoint({})
        if stage == "fit":
            rank_zero_info(described(self.objective, self.advantage))
            check_draws(self.sampling)
            check_schedule(self.optimizer, self.scheduler, self.trainer, self.execution.steps_per_batch)
        adapt_trainer(self.trainer)  # Here, since a subclass may have a `configure_callbacks` of its own.

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """See `torch.nn.Module.to`, by which Lightning converts to bf16-true; rotary frequencies keep their dtype."""
        with rotary_frequencies_kept(self):
            return super().to(*args, **kwargs)

    def teardown(self, stage: str) -> None:
        """Close the verifiers, and give the embeddings dense gradients again."""
        self.verifiers.close()
        if self.gradients is not None:
            self.gradients.release()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser of the policy's trainable parameters, with its schedule, which counts optimiser steps."""
        restored = {name.removeprefix("policy."): weight for name, weight in self._restored.items()}
        self._restored = {}
        self.gradients = Gradients(self._policy, self.trainer.strategy, restored)
        optimizer = self.gradients.make_optimizer(self.optimizer)
        self._configured = ConfiguredOptions(optimizer, self.scheduler)
        if self.scheduler is None:
            return optimizer
        scheduler: Any = self.scheduler(optimizer)  # It adds `initial_lr` to the groups.
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Apply options that were changed before a resume, now that optimiser and schedule are restored."""
        if self.trainer.ckpt_path is not None and self._configured is not None:
            self._configured.apply(self.optimizers(), self.lr_schedulers(), self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the states of credit, services and `Ahead`, and master weights; `LastCheckpoint` adds `steps_left`."""
        checkpoint["credit"], checkpoint["ahead"] = self.credit.state_dict(), self.ahead.state_dict()
        checkpoint["services"] = self.services.state_dict()
        if self.gradients is not None:
            checkpoint["state_dict"] |= self.gradients.exact_weights(prefix="policy.")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore these. An evaluation drops the master weights of an earlier fit, which belong to other parameters."""
        self.credit.load_state_dict(checkpoint.get("credit", {}))
        fits, self.weights_step = self.trainer.state.fn == "fit", checkpoint.get("global_step", 0)
        self.ahead.load_state_dict(checkpoint.get("ahead", {}) if fits else {})
        self.services.restore(checkpoint, self._stage)
        self._restored = checkpoint.get("state_dict", {}) if fits else {}
        self.gradients = self.gradients if fits else None

    # --- steps --------------------------------------------------------------------------------------------------

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> dict[str, StepOutput]:
        """Sample once, and take the configured optimiser steps; `grail_lightning.core.step` shows the tree of calls."""
        clock, loader = PhaseClock(self.device), self.trainer.train_dataloader
        policy, objective, execution = self._policy, self.objective, self.execution
        sampler = self._sampler(clock, execution.group_size, self.sampling)
        graded, refilled = collect(prompts, sampler, self.ahead, loader, execution, self.global_step, self.advantage)
        context = self.credit_context()
        with clock.phase("credit"):  # An estimator may run the policy.
            whole = assign.compute_advantages(graded, execution.group_size, self.advantage, objective, policy, context)
        batch = assign.scored_rows(whole)
        forward, token_weights = assign.assign_credit(
            self.credit, self.control, policy, batch, context, objective, clock, share_prefixes=execution.share_prefixes
        )
        # With `split_groups` all ranks must shuffle alike, so the seed does not contain the rank.
        seed_rank = 0 if execution.split_groups else self.global_rank
        with clock.phase("update"):
            update = Update(
                forward,
                token_weights,
                objective=objective,
                execution=execution,
                max_response_length=self.sampling.max_response_length,
                seed=derive_seed(run_seed(), "update", self.global_step, seed_rank),
                sampler_cap=self.sampler_cap,
                refreshes=self.credit.refresh == "step",
            )
            update.compute_before_steps()
            of_last_step = self.take_steps(update)
        self.weights_step, token_weights = self.global_step, update.final_weights()
        figures = batch_figures(whole, batch, token_weights, self.tokenizer) | refilled | of_last_step
        figures |= {f"time/{phase}": seconds for phase, seconds in clock.seconds.items()}
        warn_of_limits(figures, self._limits_warned)
        self._log(figures)
        # Progress bars show these two, and callbacks can monitor them; the others go to the loggers alone.
        bar_figures = {tag(name): figures[name] for name in ("reward", "accuracy") if name in figures}
        self.log_dict(bar_figures, prog_bar=True, logger=False, batch_size=1)
        output = StepOutput(whole, assign.with_unscored_rows(token_weights, whole), figures)
        return {"output": output}  # Lightning keeps a dictionary, or a tensor, for callbacks.

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a run whose schedule has failed, now that callbacks have saved it."""
        if self.schedule_failed is not None:
            raise self.schedule_failed

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Sample and grade; the `Evaluation` callback computes the statistics. None for a batch that it has already."""
        # Every validation has the same random numbers, so that two of them differ by the policy alone.
        done = (dataloader_idx, batch_idx) in self.evaluation.done
        return None if done else StepOutput(self._evaluate(prompts, ("eval", dataloader_idx, batch_idx)))

    def test_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """The same, with random numbers that belong to a problem: batches and ranks do not matter."""
        done = (dataloader_idx, batch_idx) in self.evaluation.done
        return None if done else StepOutput(self._evaluate(prompts, self.evaluation.seeds(prompts)))

    @torch.inference_mode(False)  # Saliency needs a graph, and tensors made under inference mode cannot be in one.
    def predict_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Token credit of sampled or given responses. Advantages are ±1 by correctness, 0 for one without a reward."""
        lacking = int(not all("response" in prompt.columns for prompt in prompts))
        # Ranks sample together, and one without a prompt does what the others do.
        if not all_reduce(torch.tensor(lacking, device=self.device), "max"):
            graded = grade_and_locate(given_batch(self._policy, prompts), self.verifiers, self.tokenizer)
        else:
            graded = self._evaluate(prompts, ("predict", batch_idx))
        batch = graded.with_advantages((graded.correct.float() * 2 - 1) * graded.scored)
        return StepOutput(batch, self._weigh(batch))

    def take_steps(self, update: Update) -> dict[str, float]:
        """Take a batch's optimiser steps but for those beyond `max_steps`; returns the figures of the last one."""
        gradients = self.gradients
        assert gradients is not None, "`configure_optimizers` makes them"
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        last, most = self.global_step + len(update.steps), self.trainer.max_steps
        self.steps_cut = max(0, last - most) if most >= 0 else 0
        figures: dict[str, float] = {}
        for number in range(len(update.steps) - self.steps_cut):
            if number:
                self._log(figures)  # The caller logs the last step's, with those of the batch.
                if update.refreshes:
                    update.set_token_weights(self._weigh(update.batch))
            optimizer.zero_grad(set_to_none=True)
            with seeded(self.device, derive_seed(run_seed(), "dropout", self.global_step, self.global_rank)):
                sums = update.accumulate(number, partial(self._backward, gradients), in_place=gradients.in_place)
            clip, seed = self.execution.max_grad_norm, derive_seed(run_seed(), "optimizer", self.global_step)
            norm_and_rate = take_step(gradients, optimizer, clip, seed=seed, warn_if_unmoved=not self._moved)
            figures = sums.figures() | norm_and_rate  # Read after the step: the host waits for them.
            self._moved |= figures["grad_norm"] > 0 and figures["learning_rate"] > 0
            if scheduler is not None and self.schedule_failed is None:
                self.schedule_failed = advance(scheduler, self.global_step)
        optimizer.zero_grad(set_to_none=True)
        return figures

    def _backward(self, gradients: Gradients, loss: torch.Tensor, last: bool) -> None:
        with gradients.accumulating(last=last):  # See there when ranks reduce the gradients.
            self.manual_backward(loss)

    @property
    def _policy(self) -> Policy:
        assert self.policy is not None, "`configure_model` loads the policy"
        return self.policy

    def _sampler(self, clock: PhaseClock, group_size: int, sampling: Sampling) -> Sampler:
        return Sampler(
            group_size=group_size,
            sampling=sampling,
            policy=self._policy,
            engine=self.engine,
            verifier=self.verifiers,
            clock=clock,
            rank=self.global_rank,
            # In a fit also for validation, before the first step: an engine that reports none is then refused at once.
            sampler_cap=self.sampler_cap if self.trainer.state.fn == "fit" else None,
        )

    def _evaluate(self, prompts: list[Prompt], key: SeedKey | list[int]) -> GradedBatch:
        self.ahead.settle()
        sampler = self._sampler(PhaseClock(self.device), self.evaluation.num_samples, self.evaluation.sampling)
        return sampler(prompts, key)

    @property
    def _stage(self) -> str:
        return str(self.trainer.state.fn and self.trainer.state.fn.value)

    @property
    def _trained_steps(self) -> int:
        """The optimiser steps behind the policy's weights."""
        return self.global_step if self._stage == "fit" else self.weights_step

    def credit_context(self) -> CreditContext:
        """What a credit method is told beside the batch, with a fresh generator."""
        step = self._trained_steps
        return CreditContext(
            step=step,
            generator=torch.Generator().manual_seed(derive_seed(run_seed(), "credit", step)),
            token_budget=self.execution.token_budget,
            temperature=self.sampling.logprob_temperature,
            services=self.services.opened(self._stage),
        )

    def _weigh(self, batch: RolloutBatch) -> TokenWeights:
        return assign.weigh_batch(self.credit, self.control, self._policy, batch, self.credit_context())

    def _log(self, figures: dict[str, float]) -> None:
        """Log at the optimiser step; Lightning's own axis counts batches."""
        tagged = {tag(name): value for name, value in figures.items()}
        for logger in self.loggers:
            logger.log_metrics(tagged, step=self.global_step)
