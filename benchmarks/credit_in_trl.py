"""Token credit inside TRL's trainer beside this package's own trainer: learning curves on the packaged policy.

    OMP_NUM_THREADS=1 python benchmarks/credit_in_trl.py --steps 60 --seeds 0 1 --out curves.jsonl
    python benchmarks/credit_in_trl.py --out curves.jsonl --table
    OMP_NUM_THREADS=1 python benchmarks/credit_in_trl.py --policy FOLDER --data FILE --steps 20 --prompts 2 --group 4

Both trainers take the same problems, group size, limit of tokens, loss (Dr. GRPO, clips 0.2), optimiser (AdamW,
constant rate, norm clipped at 1) and precision (float32), with one optimiser step for each generation. They sample with
random numbers of their own, TRL with Transformers' `generate`, ours with `HFEngine`, so that curves agree in the mean
alone. A run is one line of JSON: the reward of each step, the median seconds of a step and those of the credit, and
the share of right answers to held-out problems, sampled at temperature 1 by `HFEngine`, before and after. Runs that are
in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch

from grail_lightning import (
    ArithmeticTask,
    DrGRPO,
    Execution,
    GrailModule,
    HFEngine,
    MathTask,
    Policy,
    Prompt,
    Sampling,
)
from grail_lightning.answers import find_boxes
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import GRAIL, TokenCredit, TreeAdvantage, Uniform
from grail_lightning.worlds.sums.task import ProblemSpace

METHODS: dict[str, type[TokenCredit]] = {"Uniform": Uniform, "GRAIL": GRAIL, "TreeAdvantage": TreeAdvantage}
LIMIT = 64


def problems(number: int, split: str, seed: int) -> list[Prompt]:
    """Prompts of the arithmetic world."""
    task = ArithmeticTask()
    return [task.prompt({"problem": problem.expression}) for problem in ProblemSpace().draw(number, split, seed)]


def accuracy(policy: Policy, number: int) -> float:
    """The share of right answers to held-out problems."""
    engine, held_out = HFEngine(), problems(number, "validation", 0)
    engine.update_weights(policy)
    with policy.evaluating():
        batch = engine.generate(held_out, 1, Sampling(max_response_length=LIMIT), seed=7)
    return statistics.fmean(right(batch.texts, [prompt.reference for prompt in held_out]))


def right(completions: list[str], solution: list[str], **columns: object) -> list[float]:
    """1 for a last box that holds the solution; a reward function of TRL's."""
    answers = map(ArithmeticTask().answer, completions)
    return [float(answer == truth) for answer, truth in zip(answers, solution, strict=True)]


def in_trl(method: str, seed: int, args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """A run of TRL's trainer with token credit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import GRPOConfig

        from grail_lightning.trl import TokenCreditGRPOTrainer

    policy = load_policy("arithmetic").train()
    rows = [
        {"prompt": prompt.messages, "problem": prompt.columns["problem"], "solution": prompt.reference}
        for prompt in problems(args.prompts * args.steps, "train", seed)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_steps=1, seed=seed, max_steps=args.steps,
            per_device_train_batch_size=args.prompts * args.group,
            num_generations=args.group, max_completion_length=LIMIT, loss_type="dr_grpo", scale_rewards="none",
            learning_rate=args.rate, lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.999,
            shuffle_dataset=False,
        )  # fmt: skip
        trainer = TokenCreditGRPOTrainer(
            model=policy.model,
            reward_funcs=right,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            credit=METHODS[method](),
            credit_task=ArithmeticTask(),
        )
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
    steps = [row for row in trainer.state.log_history if "reward" in row]
    yield "rewards", [round(row["reward"], 4) for row in steps]
    yield "seconds", round(seconds / args.steps, 2)
    yield "credit_seconds", round(statistics.median(row["credit/seconds"] for row in steps), 3)
    yield "held_out", accuracy(policy.eval(), args.held_out)


class Watch(pl.Callback):
    """Keeps the rewards of each step."""

    def __init__(self):
        self.rewards = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rewards.append(round(outputs["output"].metrics["reward"], 4))


def in_ours(method: str, seed: int, args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """A run of this package's trainer."""
    pl.seed_everything(seed, verbose=False)
    module = GrailModule(
        "arithmetic",
        sampling=Sampling(max_response_length=LIMIT),
        objective=DrGRPO(),
        execution=Execution(group_size=args.group, token_budget=1024),
        credit=METHODS[method](),
        optimizer=lambda p: torch.optim.AdamW(p, lr=args.rate, weight_decay=0.0),
    )
    prompts, watch = problems(args.prompts * args.steps, "train", seed), Watch()
    cut = [prompts[k : k + args.prompts] for k in range(0, len(prompts), args.prompts)]
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    begun = time.perf_counter()
    trainer.fit(module, torch.utils.data.DataLoader(cut, batch_size=None))
    yield "rewards", watch.rewards
    yield "seconds", round((time.perf_counter() - begun) / args.steps, 2)
    yield "held_out", accuracy(module.policy.eval(), args.held_out)


def boxed(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    """1 for a complete box."""
    return [float(bool(find_boxes(completion[0]["content"]))) for completion in completions]


def last_box_is_right(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """1 for a last box that holds the answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(MathTask().answer(text) == truth) for text, truth in zip(texts, answer, strict=True)]


def real_model(args: argparse.Namespace) -> None:
    """Adapters of a real model on problems of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import load_dataset
        from peft import LoraConfig
        from trl import GRPOConfig

        from grail_lightning.trl import CreditPages, TokenCreditGRPOTrainer

    ask = r" Answer with a box alone, such as \boxed{12}."
    rows = load_dataset("json", data_files=str(args.data), split="train").select(range(args.prompts * args.steps))
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"] + ask}]})
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=args.steps, seed=args.seeds[0],
            per_device_train_batch_size=args.prompts * args.group, num_generations=args.group,
            max_completion_length=args.limit, learning_rate=args.rate, reward_weights=[1.0, 0.2],
        )  # fmt: skip
        trainer = TokenCreditGRPOTrainer(
            model=str(args.policy),
            reward_funcs=[last_box_is_right, boxed],
            correct_func=last_box_is_right,
            args=config,
            train_dataset=rows,
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
            reference_column="answer",
            credit=GRAIL(),
            callbacks=[CreditPages(every=10, folder=str(args.out.with_suffix("")))],
        )
        trainer.train()
    args.out.write_text("".join(json.dumps(row) + "\n" for row in trainer.state.log_history))


TRAINERS = {"TRL": in_trl, "ours": in_ours}


def table(file: Path) -> str:
    """Means over seeds: rewards of the first, the middle and the last ten steps, held-out accuracy, seconds a step."""
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [
        "| credit | trainer | first ten | middle ten | last ten | held out | seconds a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        for name in TRAINERS:
            some = [run for run in runs if (run["method"], run["trainer"]) == (method, name)]
            if not some:
                continue
            cells = []
            for place in (0.0, 0.5, 1.0):
                starts = [round(place * (len(run["rewards"]) - 10)) for run in some]
                means = [statistics.fmean(r["rewards"][k : k + 10]) for r, k in zip(some, starts, strict=True)]
                cells.append(", ".join(f"{mean:.3f}" for mean in means))
            cells.append(", ".join(f"{run['held_out']:.3f}" for run in some))
            cells.append(", ".join(f"{run['seconds']:.2f}" for run in some))
            lines.append(f"| `{method}` | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--trainers", nargs="+", default=[*TRAINERS], choices=TRAINERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("curves.jsonl"))
    parser.add_argument("--policy", type=Path, help="the folder of a real model")
    parser.add_argument("--data", type=Path, help="its problems, JSON lines")
    parser.add_argument("--limit", type=int, default=64, help="tokens of its completions")
    parser.add_argument("--table", action="store_true", help="print the table of the file alone")
    args = parser.parse_args()
    if args.policy is not None:
        real_model(args)
        return
    done = set()
    if args.out.exists():
        done = {tuple(json.loads(row)[n] for n in ("trainer", "method", "seed")) for row in args.out.open()}
    plan = [(name, method, seed) for seed in args.seeds for method in args.methods for name in args.trainers]
    for name, method, seed in [] if args.table else plan:
        if (name, method, seed) in done:
            continue
        run = {"trainer": name, "method": method, "seed": seed} | dict(TRAINERS[name](method, seed, args))
        with args.out.open("a") as lines:
            lines.write(json.dumps(run) + "\n")
        print(name, method, seed, run["held_out"], run["seconds"], flush=True)
    print(table(args.out))


if __name__ == "__main__":
    main()
