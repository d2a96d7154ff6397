"""A small real LightningModule whose rollouts are written down beforehand, so that every figure is known."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grail_lightning import (
    ArithmeticTask,
    DrGRPO,
    Execution,
    GroupMean,
    Loading,
    Prompt,
    Sampling,
    StepOutput,
    build_batch,
)
from grail_lightning.answers import Verdict
from grail_lightning.core.credit.base import CreditContext, TokenWeights, Uniform
from grail_lightning.core.credit.service import Services
from grail_lightning.core.distributed.gradients import Gradients
from grail_lightning.core.policy.load import load_policy
from tests.batches import rollouts
from tests.runs import trainer

TASK = ArithmeticTask()
LIMIT = 24


def prompts(number, dataset="", **columns):
    """`number` problems whose answers are 1, 2, 3, ..."""
    given = {"task": TASK, "dataset": dataset}
    return [
        Prompt(messages=f"Compute {k}+1.", reference=str(k + 1), columns={"problem": f"{k}+1"} | columns, **given)
        for k in range(number)
    ]


def loader(*batches):
    """Batches of prompts as a DataLoader that Lightning takes."""
    return torch.utils.data.DataLoader(list(batches), batch_size=None)


class Scripted(pl.LightningModule):
    """Obeys the module's contract with callbacks; the response of sample `k` to a prompt is `say(prompt, k, step)`.

    A response of None is an unfinished one. Two optimiser steps a batch.
    """

    def __init__(self, say, updates=2, group_size=2):
        super().__init__()
        self.automatic_optimization = False
        self.say, self.updates, self.group_size = say, updates, group_size
        self.sampling, self.objective = Sampling(max_response_length=LIMIT), DrGRPO(mask_truncated=True)
        self.execution, self.sampler_cap = Execution(num_iterations=updates), None
        self.policy_name, self.loading = "arithmetic", Loading()
        self.policy = load_policy("arithmetic").train()
        self.gradients = None
        self.credit, self.control, self.advantage = Uniform(), None, GroupMean()
        self.services = Services()
        self.tokenizer = self.policy.tokenizer
        self.evaluation = None
        self.seen = []
        self.steps_cut = self.weights_step = 0
        self.schedule_failed = None

    def rollouts(self, problems, num_samples):
        if not problems:  # the share of a rank in a last small batch
            return self.rollouts(prompts(1), num_samples).select(torch.zeros(0, dtype=torch.long))
        texts = [self.say(p, k, self.global_step) for p in problems for k in range(num_samples)]
        ids = [self.tokenizer("7" * LIMIT if text is None else text)["input_ids"] for text in texts]
        ends = [[] if text is None else [self.tokenizer.eos_token_id] for text in texts]
        ids = [row + end for row, end in zip(ids, ends, strict=True)]
        batch = build_batch(self.policy, problems, num_samples, ids, [text is not None for text in texts])
        return self.graded(batch)

    def graded(self, batch):
        """A right answer has the reward of its task and an advantage of 1/2, another one the opposite."""
        verdicts = [self.verdict(text, prompt) for text, prompt in zip(batch.texts, batch.prompts, strict=True)]
        right = torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool)
        given = {"tokenizer": self.tokenizer, "verdicts": verdicts}
        weights = torch.tensor([prompt.task.rewards[0].weight for prompt in batch.prompts])
        return rollouts(batch, right * weights, right.float() - 0.5, correct=right, **given)

    def verdict(self, text, prompt):
        answer = TASK.answer(text)
        if answer is None:
            return Verdict.missing(prompt.reference)
        status = "timeout" if answer == "slow" else "right" if answer == prompt.reference else "wrong"
        facts = {"status": status, "layer": "string", "gold": prompt.reference, "prediction": answer}
        return Verdict(correct=status == "right", **facts)

    def training_step(self, problems, batch_idx):
        batch = self.rollouts(problems, self.group_size)
        self.seen.append(problems)
        optimizer = self.optimizers()
        taken = self.updates
        if self.trainer.max_steps >= 0:
            taken = min(taken, self.trainer.max_steps - self.global_step)
        self.steps_cut = self.updates - taken
        for _ in range(taken):
            optimizer.zero_grad()
            self.manual_backward(sum(p.sum() for p in self.policy.parameters() if p.requires_grad))
            optimizer.step()
        self.weights_step = self.global_step
        spread = batch.rewards.reshape(-1, self.group_size)
        metrics = {
            "reward": float(batch.rewards.mean()),
            "frac_reward_zero_std": float((spread.max(1).values == spread.min(1).values).float().mean()),
            "completions/clipped_ratio": 1 - float(batch.finished.float().mean()),
        }
        return {"output": StepOutput(batch, None, metrics)}

    def validation_step(self, problems, batch_idx, dataloader_idx=0):
        return StepOutput(self.rollouts(problems, self.evaluation.num_samples if self.evaluation else 1))

    test_step = validation_step

    def predict_step(self, problems, batch_idx, dataloader_idx=0):
        batch = self.rollouts(problems, 1)
        values = batch.response_mask * torch.arange(batch.response_ids.shape[1]).float()
        fallback = ~batch.answer.whole.any(1)
        return StepOutput(batch, TokenWeights(values=values, scores=values * 2, fallback=fallback))

    def on_load_checkpoint(self, checkpoint):
        self.weights_step = checkpoint["global_step"]

    def credit_context(self):
        return CreditContext(step=self.global_step, generator=torch.Generator(), token_budget=4096)

    def configure_optimizers(self):
        self.gradients = Gradients(self.policy, self.trainer.strategy)
        return self.gradients.make_optimizer(lambda p: torch.optim.SGD(p, lr=1e-3))

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


def box(answer):
    """A response that gives `answer`."""
    return f"\\boxed{{{answer}}}"


def run(max_steps, *callbacks, **options):
    """A quiet Trainer on one CPU process, which does not validate before it trains."""
    return trainer(max_steps, *callbacks, **({"num_sanity_val_steps": 0} | options))


def board(folder):
    """A logger that writes into the folder itself."""
    return TensorBoardLogger(folder, name="", version="")


def scalars(folder):
    """All scalars that TensorBoard would show, in the order in which they were written: name -> [(step, value)]."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in _as_written(events.Scalars(tag))] for tag in events.Tags()["scalars"]}


def panels(folder):
    """All texts that TensorBoard would show: name -> [(step, markdown)]."""
    events = EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    return {
        tag.removesuffix("/text_summary"): [
            (e.step, e.tensor_proto.string_val[0].decode("utf-8")) for e in _as_written(events.Tensors(tag))
        ]
        for tag in tags
    }


def _as_written(events):
    """Events in the order of time: files of one second are read by their names, where the tenth precedes the ninth."""
    return sorted(events, key=lambda event: event.wall_time)
