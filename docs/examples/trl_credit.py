"""The first script of TRL's documentation, with token credit."""

from datasets import load_dataset
from trl.rewards import accuracy_reward

from grail_lightning.credit import GRAIL
from grail_lightning.trl import TokenCreditGRPOTrainer  # in place of GRPOTrainer

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = TokenCreditGRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
    credit=GRAIL(),
)
trainer.train()
