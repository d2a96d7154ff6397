"""A whole run: the packaged policy learns sums, in about a minute of one core."""

from functools import partial

from lightning.pytorch import Trainer
from torch.optim import AdamW

from grail_lightning import ArithmeticData, GrailModule, Sampling, default_callbacks

adam = partial(AdamW, lr=1e-4, weight_decay=0.0)
module = GrailModule("arithmetic", sampling=Sampling(max_response_length=64), optimizer=adam)
data = ArithmeticData(num_val=256, prompts_per_batch=16)
Trainer(max_steps=60, max_epochs=-1, callbacks=default_callbacks()).fit(module, data)
