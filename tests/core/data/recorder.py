"""A real Trainer around a module that only writes down its prompts, and small files to read."""

import itertools
import json

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from grail_lightning import ArithmeticData, MathTask, Prompt

TASK = MathTask()


def prompts(num, prefix=""):
    return [Prompt(messages=f"{prefix}{n}", reference="", task=TASK) for n in range(num)]


def names(batches):
    return [[prompt.messages for prompt in batch] for batch in batches]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def write(folder, rows, name="train.jsonl"):
    """A JSONL file of dicts; strings go into it as they are."""
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(num):
    return [{"problem": f"{n}+1?", "answer": str(n + 1), "level": n} for n in range(num)]


def problems(loader):
    return [prompt.columns["problem"] for batch in loader for prompt in batch]


class Recorder(pl.LightningModule):
    """Trains one number and writes down the prompts that it gets."""

    def __init__(self, manual=False):
        super().__init__()
        self.automatic_optimization = not manual
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_prompts = []

    def training_step(self, prompts, batch_idx):
        self.train_prompts.append([prompt.columns["problem"] for prompt in prompts])
        if self.automatic_optimization:
            return self.weight.square().sum()
        optimizer = self.optimizers()
        for _ in range(2):  # two optimiser steps a batch, as with two passes over the rollouts
            optimizer.zero_grad()
            self.manual_backward(self.weight.square().sum())
            optimizer.step()
        return None

    def validation_step(self, prompts, batch_idx, dataloader_idx=0):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEveryBatch(Callback):
    def __init__(self, folder):
        self.folder, self.batches = folder, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        trainer.save_checkpoint(self.folder / f"{self.batches}.ckpt")


def fit(module, data, checkpoint=None, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False} | quiet | options
    trainer = pl.Trainer(**options)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=checkpoint and False)
    return trainer


def ten(**options):
    """Ten problems in batches of 4, 4, 2."""
    return ArithmeticData(num_train=10, num_val=6, prompts_per_batch=4, eval_prompts_per_batch=4, **options)
