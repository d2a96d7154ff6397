"""The LightningModule: generate → grade → advantages → credit → surrogate → step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from grail_lightning.answers.verifier import Verdict, Verifier
from grail_lightning.clock import synchronised_clock
from grail_lightning.credit import CreditContext, CreditControl, TokenCredit, TokenWeights, Uniform
from grail_lightning.credit.base import controlled, weigh
from grail_lightning.credit.shared import SharedSaliency, share_forward
from grail_lightning.engines import HFEngine, RolloutEngine
from grail_lightning.engines.base import given_batch, sample_rollouts
from grail_lightning.grading import grade_and_locate
from grail_lightning.locate import step_masks
from grail_lightning.objective import Objective, advantages, loss_mask
from grail_lightning.optimizer_check import check_optimizer
from grail_lightning.outputs import EvaluationPlan, StepOutput
from grail_lightning.policy import Loading, Policy, check_policy, encode_prompt, load_policy, load_tokenizer
from grail_lightning.policy.accumulation import accumulating, make_optimizer, master_weights, plain_gradients
from grail_lightning.policy.options import check_dtype, check_precision
from grail_lightning.policy.sharding import check_strategy, data_parallel_mesh, gathered, shard
from grail_lightning.ranks import world_size
from grail_lightning.refill import check_loader, refill
from grail_lightning.reports import credit_report, rollout_report
from grail_lightning.rollout import Messages, Prompt, RolloutBatch, Sampling
from grail_lightning.seeds import derive_seed, run_seed, seeded
from grail_lightning.stepping import configured_options, cut_off, keep_options, option_record, take_step, with_schedule
from grail_lightning.update import Update


class GrailModule(pl.LightningModule):
    """Trains a policy by reinforcement learning with verifiable rewards, with credit for each token.

    Args:
        policy: A model on the hub, a folder in Hugging Face format, or the packaged `arithmetic`.
        sampling: How training responses are drawn.
        loading: How the policy is loaded.
        engine: What samples; default `HFEngine`.
        objective: Group size, passes, clips, aggregation, KL, token budget.
        credit: Who gets the credit: Uniform (GRPO), GRAIL, or a class of your own by its import path.
        control: A control experiment around the credit: Shuffled, Random or AnswerOnly.
        optimizer: Gets the trainable parameters of the policy. `torchao.optim.AdamW8bit` keeps its state in 8 bits.
        scheduler: Counts optimiser steps.

    Raises:
        ValueError: If the policy cannot be found or loaded the way that is asked for.
    """

    def __init__(
        self,
        policy: str,
        sampling: Sampling,
        loading: Loading = Loading(),  # noqa: B008  (frozen)
        engine: RolloutEngine | None = None,
        objective: Objective = Objective(),  # noqa: B008  (frozen)
        credit: TokenCredit | None = None,
        control: CreditControl | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_optimizer(optimizer, scheduler)
        check_policy(policy, loading, sampling.max_response_length)
        self.policy_name, self.loading, self.sampling, self.objective = policy, loading, sampling, objective
        self.engine, self.credit, self.control = engine or HFEngine(), credit or Uniform(), control
        self.optimizer, self.scheduler = optimizer, scheduler
        self.policy: Policy | None = None
        self.reference: Policy | None = None
        self.evaluation: EvaluationPlan | None = None
        self.verifier: Verifier | None = None
        self._tokenizer, self._seconds = None, defaultdict[str, float](float)
        self._moved, self._options, self._recorded = False, list[dict[str, Any]](), None
        self.steps_left = 0  # Steps of the last batch that `max_steps` has cut off.

    # --- setting up ---------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; there before the weights are."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_name, self.loading.trust_remote_code)
        return self._tokenizer

    def encode(self, messages: Messages | str) -> list[int]:
        """A prompt as token ids, through the chat template where there is one."""
        return encode_prompt(self.tokenizer, messages, self.loading.chat_template_kwargs)

    def configure_model(self) -> None:
        """Load policy and, with a KL term, the frozen reference; called by the strategy, whenever a run begins."""
        if self.policy is None:
            check_precision(self.trainer.precision)
            check_strategy(self.trainer.strategy)
            if self.trainer.state.fn == "fit":
                check_dtype(self.policy_name, self.loading)
            self.policy = self._load(trainable=True)
        needed = self.objective.kl_coefficient and self.loading.lora is None and self.trainer.state.fn == "fit"
        if needed and self.reference is None:
            # With adapters the reference is the policy without them. Not a submodule: it is no part of a checkpoint.
            self.__dict__["reference"] = self._load(trainable=False)

    def _load(self, trainable: bool) -> Policy:
        half, mesh = "16" in str(self.trainer.precision), data_parallel_mesh(self.device_mesh, self.loading)
        policy = load_policy(self.policy_name, self.loading, half_precision=half, trainable=trainable)
        policy.train(trainable)  # `from_pretrained` gives evaluation mode, in which checkpointed blocks would not be.
        return policy if mesh is None else shard(policy, mesh)

    def setup(self, stage: str) -> None:
        """Open the verifier pool."""
        self.verifier = Verifier()
        # Prompts hold no tensors, and Lightning's conversion (FSDP, double) refuses the frozen records in a batch.
        self.trainer.precision_plugin.convert_input = lambda data: data  # type: ignore[method-assign]

    def on_train_start(self) -> None:
        """Changed options win over the optimiser's restored state; and the reference goes where the policy is."""
        check_loader(self.trainer.train_dataloader, self.objective.refill_rounds)
        if self.trainer.ckpt_path is not None:
            restored = self.optimizers(), self.lr_schedulers()
            keep_options(*restored, self._options, self.scheduler, self._recorded, self.global_step)
        if self.reference is not None and self.policy is not None and self.device_mesh is None:
            self.reference.to(device=self.policy.device, dtype=self.policy.model.dtype)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What the credit method has to remember, options, and weights in half precision as their masters have them."""
        checkpoint["credit"] = self.credit.state_dict()
        checkpoint["configured"] = option_record(self._options, self.scheduler) if self._options else None
        checkpoint["state_dict"] |= master_weights(self.policy, prefix="policy.")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give it back. Weights for an evaluation have no masters: those of a fit before it would be of others."""
        self.credit.load_state_dict(checkpoint.get("credit", {}))
        fits = self.trainer.state.fn == "fit"
        self._restored, self._recorded = checkpoint.get("state_dict", {}) if fits else {}, checkpoint.get("configured")
        if self.policy is not None and not fits:
            self.policy.masters = None

    def teardown(self, stage: str) -> None:
        """Close the verifier pool, and let embeddings have gradients as everybody expects them."""
        if self.verifier is not None:
            self.verifier.close()
        self.verifier = None
        if self.policy is not None:
            plain_gradients(self.policy)

    def configure_optimizers(self) -> Any:
        """Trainable parameters of the policy alone; the reference never gets here."""
        assert self.policy is not None
        restored = {k.removeprefix("policy."): w for k, w in vars(self).pop("_restored", {}).items()}
        optimizer = make_optimizer(self.policy, self.trainer.strategy, self.optimizer, restored)
        self._options = configured_options(optimizer)
        return with_schedule(optimizer, self.scheduler)

    # --- steps --------------------------------------------------------------------------------------------------

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> dict[str, StepOutput]:
        """One batch of prompts: one sampling, and as many optimiser steps as the objective asks for."""
        assert self.policy is not None
        self._seconds.clear()
        loader, rounds = self.trainer.train_dataloader, self.objective.refill_rounds
        batch, verdicts, drawn = refill(*self._draw(prompts), self._draw, loader, rounds)
        batch = batch.replace(advantages=advantages(batch, self.objective))
        with self._clock("credit"):
            shared = self.share(batch)
            weights = self.weigh(batch) if shared is None else shared.weights(self.policy)
        with self._clock("update"):
            updated, entropies = self.update(batch, weights, shared)
        if shared is not None:
            weights = shared.weights(self.policy)
            self._seconds["credit"] += shared.seconds
            self._seconds["update"] -= shared.seconds
        steps = None if weights.scores is None else step_masks(batch, self.tokenizer)
        report = rollout_report(batch, verdicts) | drawn | updated | credit_report(batch, weights, steps, entropies)
        report |= {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._log(report)
        self.log_dict({k: report[k] for k in ("reward", "accuracy")}, prog_bar=True, logger=False, batch_size=1)
        return {"output": StepOutput(batch, verdicts, weights, report)}

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Sample and grade; the `Evaluation` callback does the statistics."""
        plan = self.evaluation or EvaluationPlan(num_samples=1, sampling=self.sampling)
        # The same random numbers at every validation: a difference between two of them is a difference of the policy.
        return StepOutput(*self.sample(prompts, plan.num_samples, plan.sampling, ("eval", dataloader_idx, batch_idx)))

    test_step = validation_step

    @torch.inference_mode(False)  # Saliency needs a graph, and tensors made under inference mode cannot be in one.
    def predict_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Token credit of sampled responses, or of given ones (column `response`). Advantages are ±1 by correctness."""
        assert self.policy is not None
        if prompts and all("response" in prompt.columns for prompt in prompts):
            batch, verdicts = self._graded(given_batch(self.policy, prompts))
        else:
            plan = self.evaluation or EvaluationPlan(num_samples=1, sampling=self.sampling)
            batch, verdicts = self.sample(prompts, plan.num_samples, plan.sampling, ("predict", batch_idx))
        assert batch.correct is not None
        batch = batch.replace(advantages=batch.correct.float() * 2 - 1)
        return StepOutput(batch, verdicts, self.weigh(batch))

    # --- stages of a step ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self, prompts: list[Prompt], group_size: int, sampling: Sampling, key: tuple[int | str, ...]
    ) -> tuple[RolloutBatch, list[Verdict]]:
        """Graded responses with located answers. `key` and the run's seed decide the random numbers."""
        assert self.policy is not None
        with self._clock("sample"):
            self.engine.update_weights(self.policy)
            seed = derive_seed(run_seed(), *key, self.global_rank)
            with gathered(self.policy):
                batch = sample_rollouts(self.engine, self.policy, prompts, group_size, sampling, seed)
            # A rollout is the same row of the step however many ranks share the prompts out.
            group, place = batch.row // group_size, batch.row % group_size
            batch = batch.replace(row=(group * world_size() + self.global_rank) * group_size + place)
        with self._clock("grade"):
            return self._graded(batch)

    def _draw(self, prompts: list[Prompt], number: int = 0) -> tuple[RolloutBatch, list[Verdict]]:
        """The rollouts of a training step; `number` counts further samplings in it."""
        return self.sample(prompts, self.objective.group_size, self.sampling, ("train", self.global_step, number))

    def _graded(self, batch: RolloutBatch) -> tuple[RolloutBatch, list[Verdict]]:
        assert self.verifier is not None
        return grade_and_locate(batch, self.verifier, self.tokenizer)

    def weigh(self, batch: RolloutBatch, earlier: TokenWeights | None = None) -> TokenWeights:
        """Token weights of the configured credit, through the configured control; `earlier` are those of the batch."""
        assert self.policy is not None
        context = replace(self._context(), earlier=earlier)
        with gathered(self.policy):
            weights = weigh(self.credit, self.policy, batch, context)
        return weights if self.control is None else controlled(self.control, weights, batch, context)

    def share(self, batch: RolloutBatch) -> SharedSaliency | None:
        """Credit that takes its saliency from the update's first forward pass; None: `weigh` before the update."""
        assert self.policy is not None
        if self.control is not None or self.objective.entropy_coefficient:
            return None  # A control may need all weights at once; the shared pass has no gradient of the entropy.
        trained = loss_mask(batch, self.objective).any(1)
        return share_forward(self.credit, self.policy, batch, self._context(), trained)

    def _context(self) -> CreditContext:
        return CreditContext(
            step=self.global_step,
            generator=torch.Generator().manual_seed(derive_seed(run_seed(), "credit", self.global_step)),
            token_budget=self.objective.token_budget,
            temperature=self.sampling.logprob_temperature,
        )

    def update(
        self, batch: RolloutBatch, weights: TokenWeights, shared: SharedSaliency | None = None
    ) -> tuple[dict[str, float], Tensor]:
        """The optimiser steps of one batch, or as many as `max_steps` leaves; metrics of the last, and entropies."""
        assert self.policy is not None
        seed = derive_seed(run_seed(), "update", self.global_step, self.global_rank)
        update = Update(self.policy, self.reference, batch, self.objective, self.sampling, seed, shared)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        metrics: dict[str, float] = {}
        plan = update.plan(weights.values, weights.additive)
        self.steps_left = cut_off(self.trainer, len(plan))
        for number, rows in enumerate(plan[: len(plan) - self.steps_left]):
            if number:
                self._log(metrics)
                if self.credit.refresh == "update":
                    fresh = self.weigh(batch, weights)
                    update.reweigh(fresh.values, fresh.additive)
            optimizer.zero_grad(set_to_none=True)
            with seeded(self.policy.device, derive_seed(run_seed(), "dropout", self.global_step, self.global_rank)):
                metrics = update.accumulate(rows, self._backward)
            metrics |= take_step(self.policy, optimizer, self.objective.max_grad_norm, watched=not self._moved)
            self._moved |= metrics["grad_norm"] > 0 and metrics["learning_rate"] > 0
            if scheduler is not None:
                scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return metrics, update.entropies

    def _backward(self, loss: Tensor, last: bool) -> None:
        assert self.policy is not None
        with accumulating(self.policy, self.trainer.strategy, last=last):
            self.manual_backward(loss)

    # --- reporting ----------------------------------------------------------------------------------------------

    def _log(self, metrics: dict[str, float]) -> None:
        """To the loggers at the optimiser step; Lightning's own axis counts batches."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.global_step)

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = synchronised_clock(self.device)
        yield
        self._seconds[phase] += synchronised_clock(self.device) - start
