"""Trainers of TRL on the packaged policy, with token credit or without; their own code samples, scores and trains."""

import warnings

import pytest

from grail_lightning import ArithmeticTask
from grail_lightning.core.policy.load import load_policy
from tests.runs import GROUP, LIMIT, problems

with warnings.catch_warnings():
    # Of the peer and its dependencies while they are imported; nothing of ours.
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", minversion="1.16")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # noqa: F401  (for tests, which import it from here)

    from grail_lightning.trl import CreditPages, TokenCreditGRPOTrainer, TokenCreditMixin  # noqa: F401

# Of TRL, for what a test has it do.
OF_TRL = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)':UserWarning"),
]


def rows_of(prompts):
    """Rows of a dataset of TRL's, which have the columns of ours and the reference."""
    return [{"prompt": p.messages, "problem": p.columns["problem"], "solution": p.reference} for p in prompts]


def right(completions, solution, **columns):
    """A reward function: 1 for a last box that holds the solution."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(answer == truth) for answer, truth in zip(map(ArithmeticTask().answer, texts), solution, strict=True)]


def handing_over(batch, rewards=None):
    """Arguments with which TRL takes the responses, and the rewards, of a batch for its own."""
    begun = batch.input_ids[:, : batch.prompt_width], batch.attention_mask[:, : batch.prompt_width]
    given = {
        "prompt_ids": [row[m].tolist() for row, m in zip(*begun, strict=True)],
        "completion_ids": [row[m].tolist() for row, m in zip(batch.response_ids, batch.valid_mask, strict=True)],
        "logprobs": None,
    }
    if batch.turn is not None:
        pairs = zip(batch.response_mask, batch.valid_mask, strict=True)
        given["env_mask"] = [row[m].long().tolist() for row, m in pairs]
    told = (batch.rewards if rewards is None else rewards).tolist()
    return {
        "rollout_func": lambda prompts, trainer: {name: list(part) if part else None for name, part in given.items()},
        "reward_funcs": lambda completions, **_: [None if value != value else value for value in told],
    }


def trainer_of(folder, kind=TokenCreditGRPOTrainer, *, policy=None, rows=None, args=None, **more):
    """A trainer on a copy of the packaged policy; `args` are options of `GRPOConfig`."""
    policy = policy or load_policy("arithmetic").train()
    rows = rows_of(problems(16)) if rows is None else rows
    usual = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "num_generations": GROUP, "max_completion_length": LIMIT, "per_device_train_batch_size": 16,
        "loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
    }  # fmt: skip
    given = {"reward_funcs": right, "processing_class": policy.tokenizer} | more
    config = GRPOConfig(**usual | (args or {}))
    return kind(model=policy.model, args=config, train_dataset=Dataset.from_list(rows), **given)


def scored(trainer, batch):
    """What TRL makes of the responses of a batch that it was handed over."""
    return trainer._generate_and_score_completions(rows_of(batch.prompts))


def gradients(trainer):
    """The gradients of a trainer's model by name."""
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def loss_of(trainer, inputs):
    """TRL's loss of a whole generation, with its gradients."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), gradients(trainer)
