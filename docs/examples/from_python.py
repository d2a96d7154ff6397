"""A run whose problems, rewards and model are objects of a Python program."""

import asyncio
from functools import partial

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer

from grail_lightning import (
    ArithmeticTask,
    GrailModule,
    MathData,
    RewardSpec,
    Sampling,
    correctness,
    default_callbacks,
    resolve_policy,
)
from grail_lightning.credit import GRAIL

seed_everything(0)

train = [
    {"problem": "7+5-3+8-9", "answer": 8},
    {"problem": "4+9-6-2+5", "answer": 10},
    {"problem": "8-6+8+9-5", "answer": 14},
    {"problem": "9+2+9-4-2", "answer": 14},
]
val = [{"problem": "1+5+5+5-3", "answer": 13}, {"problem": "4-7+2+7+8", "answer": 14}]


async def brevity(responses: list[str], references: list[str], *, lengths: list[int]) -> list[float]:
    """Near 1 for a short response. A judge behind a web service would be asked in the same way, all rows at once."""

    async def judge(length: int) -> float:
        await asyncio.sleep(0.01)
        return 1 / (1 + length / 32)

    return await asyncio.gather(*map(judge, lengths))


folder = resolve_policy("arithmetic")  # Any folder or name that Transformers takes.
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

module = GrailModule(
    policy=(model, tokenizer),
    sampling=Sampling(max_response_length=64),
    credit=GRAIL(),
    optimizer=partial(AdamW, lr=1e-4, weight_decay=0.0),
)
task = ArithmeticTask(rewards=[correctness, RewardSpec(function=brevity, weight=0.1)])
data = MathData(train=train, val=val, predict=val, task=task, prompts_per_batch=4)
logger = TensorBoardLogger("runs", name="from_python", version="")  # The run's folder: runs/from_python.
trainer = Trainer(max_steps=20, max_epochs=-1, log_every_n_steps=1, logger=logger, callbacks=default_callbacks())
trainer.fit(module, data)
trained = module.policy.model
trainer.predict(module, data, return_predictions=False)
