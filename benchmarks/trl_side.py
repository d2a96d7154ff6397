"""TRL's side of step_vs_trl.py: GRPOTrainer set to its fastest, in a process of its own that waits for its turns.

Only TRL's sampler is replaced, in the cases with given responses (`rollout_func`, its own hook); the subclass only
measures time.
"""

import tempfile
import time
import warnings
from dataclasses import replace

import torch
from datasets import Dataset
from stand_in import RIGHT, StandInTask, stand_in_responses
from step_vs_trl import CASES, Case, arguments
from transformers import TrainerCallback
from turns import Turns

from grail_lightning.answers import find_boxes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOConfig, GRPOTrainer


class Watched(GRPOTrainer):
    """Keeps the seconds of sampling, and of sampling with scoring."""

    def _generate(self, prompts):
        start = time.perf_counter()
        made = super()._generate(prompts)
        self.sampling = time.perf_counter() - start
        self.tokens = sum(len(ids) for ids in made[1])
        return made

    def _generate_and_score_completions(self, inputs):
        start = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.scoring = time.perf_counter() - start - self.sampling
        return made


class Report(TrainerCallback):
    """Takes turns at optimiser steps."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: Watched | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.turns.begin()

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
        assert trainer is not None
        reward = trainer._metrics["train"]["reward"][-1]
        self.turns.end(sample=trainer.sampling, grade=trainer.scoring, tokens=trainer.tokens, reward=reward)


def right_box(completions, reference, **_):
    """1 where the last box holds the reference."""
    boxes = [find_boxes(text) for text in completions]
    inside = [t[b[-1].content_start : b[-1].content_stop] if b else "" for t, b in zip(completions, boxes, strict=True)]
    return [float(given.strip() == wanted) for given, wanted in zip(inside, reference, strict=True)]


class Given:
    """The seeded responses, one set for each call, as TRL's `rollout_func`."""

    def __init__(self, case: Case, tokenizer, dead: float) -> None:
        self.case, self.tokenizer, self.dead, self.calls = case, tokenizer, dead, 0

    def __call__(self, prompts, trainer):
        case = self.case
        lengths = (case.shortest, case.limit)
        made = stand_in_responses(
            self.tokenizer, case.prompts, case.group_size, lengths, seed=self.calls, dead=self.dead
        )
        self.calls += 1
        return {"prompt_ids": self.tokenizer(prompts)["input_ids"], "completion_ids": made, "logprobs": None}


def config(case: Case, rows: int, steps: int, seed: int, folder: str) -> GRPOConfig:
    """One optimiser step for each sampling, in micro-batches of `rows`; nothing that costs time and can be left out."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=case.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=case.rows // rows,
        num_generations=case.group_size,
        max_completion_length=case.limit,
        max_steps=steps,
        shuffle_dataset=False,
        seed=seed,
        loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        log_completions=False,
    )


def work(case: Case, steps: int, seed: int, rows: int, dead: float) -> None:
    """The worker of TRL's side."""
    turns = Turns(case.device)
    policy = case.policy()
    prompts = [prompt for batch in case.batches(steps, seed) for prompt in batch]
    given = None if case.trunk is None else Given(case, policy.tokenizer, dead)
    if given is not None:
        assert all(isinstance(prompt.task, StandInTask) and prompt.reference == RIGHT for prompt in prompts)
    report = Report(turns)
    with tempfile.TemporaryDirectory() as folder:
        report.trainer = Watched(
            model=policy.model,
            reward_funcs=right_box,
            args=config(case, rows, steps, seed, folder),
            train_dataset=Dataset.from_list([{"prompt": p.messages, "reference": p.reference} for p in prompts]),
            processing_class=policy.tokenizer,
            callbacks=[report],
            rollout_func=given,
        )
        report.trainer.train()


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    case = replace(CASES[options.case], device=options.device)
    work(case, options.steps, options.seeds[0], options.worker, options.dead)


if __name__ == "__main__":
    main()
