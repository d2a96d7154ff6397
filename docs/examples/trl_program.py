"""The same run as a program, with the objects that TRL's trainer takes."""

from functools import partial

from lightning.pytorch import Trainer
from torch.optim import AdamW
from trl_environment import House, arrived, few_calls, multiply

from grail_lightning import (
    DAPO,
    EnvironmentTask,
    Execution,
    GrailModule,
    MathData,
    RewardSpec,
    Sampling,
    default_callbacks,
)

SYSTEM = {"role": "system", "content": "Use the tools."}
rows = [{"prompt": [SYSTEM, {"role": "user", "content": "Help me."}], "target": target} for target in range(1, 17)]

task = EnvironmentTask(
    House, tools=[multiply], rewards=[arrived, RewardSpec(function=few_calls, weight=0.05)], solved_at=0.5
)
module = GrailModule(
    "Qwen/Qwen3-0.6B",
    sampling=Sampling(max_response_length=512),
    execution=Execution(group_size=8),
    objective=DAPO(clip_high=0.2, mask_truncated=False),
    optimizer=partial(AdamW, lr=1e-6, weight_decay=0.0),
)
data = MathData(train=rows, task=task, prompts_per_batch=16)
trainer = Trainer(max_steps=200, precision="bf16-true", callbacks=default_callbacks())

if __name__ == "__main__":  # Answers are compared in processes, which import this file.
    trainer.fit(module, data)
