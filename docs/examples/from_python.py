"""A run from Python instead of the command line."""

from functools import partial

from lightning.pytorch import Trainer, seed_everything
from torch.optim import AdamW

from grail_lightning import ArithmeticData, GrailModule, default_callbacks
from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL

seed_everything(0)
sampling = Sampling(max_response_length=64)
module = GrailModule("arithmetic", sampling, credit=GRAIL(), optimizer=partial(AdamW, lr=1e-4, weight_decay=0.0))
trainer = Trainer(max_steps=120, max_epochs=-1, num_sanity_val_steps=0, callbacks=default_callbacks())
trainer.fit(module, ArithmeticData(prompts_per_batch=16))
