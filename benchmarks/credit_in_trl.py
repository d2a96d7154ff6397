"""Token credit inside TRL's trainer beside this package's own trainer: learning curves on the packaged policy.

    OMP_NUM_THREADS=1 python benchmarks/credit_in_trl.py --steps 60 --seeds 0 1 --out curves.jsonl
    python benchmarks/credit_in_trl.py --out curves.jsonl --table
    OMP_NUM_THREADS=1 python benchmarks/credit_in_trl.py --policy SMOLLM2 --data gsm8k_train.jsonl --steps 20 \
        --prompts 2 --group 4 --limit 96 --seeds 0 --methods GRAIL --held-out 0 --out real.jsonl

Both trainers take the same problems, group size, limit of tokens, loss (Dr. GRPO, clips 0.2), optimiser (AdamW,
constant rate, norm clipped at 1) and precision (float32), with one optimiser step for each generation. They sample with
random numbers of their own, TRL with Transformers' `generate`, ours with `HFEngine`, so that curves agree in the mean
alone. A run is one line of JSON: the reward of each step, the median seconds of a step and those of the credit, and
the share of right answers to held-out problems, sampled at temperature 1 by `HFEngine`. Runs that are in the file are
not repeated. With `--policy` adapters of a pretrained model are trained on problems of a file with the columns problem,
solution and answer; a worked example stands before each question, and the answer follows `####`.
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
from typing import Any

import lightning.pytorch as pl
import torch

from grail_lightning import (
    ArithmeticTask,
    DatasetSpec,
    DrGRPO,
    Execution,
    FewShot,
    GrailModule,
    HFEngine,
    Loading,
    LoRA,
    MathData,
    MathTask,
    Policy,
    Prompt,
    Sampling,
)
from grail_lightning.answers import Marker
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import GRAIL, TokenCredit, TreeAdvantage, Uniform
from grail_lightning.worlds.sums.task import ProblemSpace

METHODS: dict[str, type[TokenCredit]] = {"Uniform": Uniform, "GRAIL": GRAIL, "TreeAdvantage": TreeAdvantage}
_EXAMPLES = 1


class Setting:
    """The policy, its problems and the form of their answers.

    Args:
        args: The options of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.limit, self.lora = args.limit, None if args.policy is None else LoRA(rank=8)
        self.policy = "arithmetic" if args.policy is None else str(args.policy)
        self.task: ArithmeticTask | MathTask = ArithmeticTask()
        self.rows: list[Prompt] = []
        if args.policy is not None:
            self.task = MathTask(answer=Marker(), instruction="")
            self.rows = self._of_file(args.data)

    def _of_file(self, file: Path) -> list[Prompt]:
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / "rows.jsonl").open("w") as lines:
                for row in map(json.loads, file.open()):
                    solution = f"{row['solution']}\n#### {row['answer']}"
                    kept = {"problem": row["problem"], "solution": solution, "answer": row["answer"]}
                    lines.write(json.dumps(kept) + "\n")
            data = MathData(
                train=DatasetSpec(path=lines.name, name="problems"),
                task=self.task,
                few_shot=FewShot(_EXAMPLES),
            )
            (problems,) = data.load("train")
        return problems.prompts

    def problems(self, number: int, split: str, seed: int) -> list[Prompt]:
        """Prompts of the arithmetic world; or of the file, from its end for another split than train."""
        if self.rows:
            return self.rows[seed * number : (seed + 1) * number] if split == "train" else self.rows[-number:]
        drawn = ProblemSpace().draw(number, split, seed)
        return [self.task.prompt({"problem": problem.expression}) for problem in drawn]

    def right(self, completions: list[Any], solution: list[str], **columns: object) -> list[float]:
        """1 for an answer that is the solution; a reward function of TRL's."""
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [float(self.task.answer(text) == truth) for text, truth in zip(texts, solution, strict=True)]

    def accuracy(self, policy: Policy, number: int) -> float | None:
        """The share of right answers to held-out problems."""
        if not number:
            return None
        engine, held_out = HFEngine(), self.problems(number, "validation", 0)
        engine.update_weights(policy)
        with policy.evaluating():
            batch = engine.generate(held_out, 1, Sampling(max_response_length=self.limit), seed=7)
        return statistics.fmean(self.right(batch.texts, [prompt.reference for prompt in held_out]))


def in_trl(setting: Setting, method: str, seed: int, args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """A run of TRL's trainer with token credit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import GRPOConfig

        from grail_lightning.trl import TokenCreditGRPOTrainer

    policy = load_policy(setting.policy, Loading(dtype="float32")).train()
    rows = [
        {"prompt": prompt.messages, "problem": prompt.columns.get("problem", ""), "solution": prompt.reference}
        for prompt in setting.problems(args.prompts * args.steps, "train", seed)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_steps=1, seed=seed, max_steps=args.steps,
            per_device_train_batch_size=args.prompts * args.group,
            num_generations=args.group, max_completion_length=setting.limit, loss_type="dr_grpo", scale_rewards="none",
            learning_rate=args.rate, lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.999,
            shuffle_dataset=False,
        )  # fmt: skip
        adapters = None
        if setting.lora is not None:
            from peft import LoraConfig

            adapters = LoraConfig(
                r=setting.lora.rank, lora_alpha=setting.lora.alpha, target_modules=setting.lora.target_modules,
                task_type="CAUSAL_LM",
            )  # fmt: skip
        trainer = TokenCreditGRPOTrainer(
            model=policy.model,
            reward_funcs=setting.right,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            peft_config=adapters,
            credit=METHODS[method](),
            credit_task=setting.task,
        )
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
    steps = [row for row in trainer.state.log_history if "reward" in row]
    yield "rewards", [round(row["reward"], 4) for row in steps]
    yield "seconds", round(seconds / args.steps, 2)
    yield "credit_seconds", round(statistics.median(row["credit/seconds"] for row in steps), 3)
    yield "held_out", setting.accuracy(policy.eval(), args.held_out)


class Watch(pl.Callback):
    """Keeps the rewards of each step."""

    def __init__(self):
        self.rewards = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rewards.append(round(outputs["output"].metrics["reward"], 4))


def in_ours(setting: Setting, method: str, seed: int, args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """A run of this package's trainer."""
    pl.seed_everything(seed, verbose=False)
    module = GrailModule(
        setting.policy,
        sampling=Sampling(max_response_length=setting.limit),
        loading=Loading(dtype="float32", lora=setting.lora),
        objective=DrGRPO(),
        execution=Execution(group_size=args.group, token_budget=1024),
        credit=METHODS[method](),
        optimizer=lambda p: torch.optim.AdamW(p, lr=args.rate, weight_decay=0.0),
    )
    prompts, watch = setting.problems(args.prompts * args.steps, "train", seed), Watch()
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
    yield "held_out", setting.accuracy(module.policy.eval(), args.held_out)


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
            cells.append(", ".join("-" if run["held_out"] is None else f"{run['held_out']:.3f}" for run in some))
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
    parser.add_argument("--policy", type=Path, help="the folder of a pretrained model")
    parser.add_argument("--data", type=Path, help="its problems, JSON lines")
    parser.add_argument("--limit", type=int, default=64, help="tokens of its completions")
    parser.add_argument("--table", action="store_true", help="print the table of the file alone")
    args = parser.parse_args()
    if (args.policy is None) != (args.data is None):
        parser.error("--policy and --data must be given together.")
    setting = Setting(args)
    done = set()
    if args.out.exists():
        done = {tuple(json.loads(row)[n] for n in ("trainer", "method", "seed")) for row in args.out.open()}
    plan = [(name, method, seed) for seed in args.seeds for method in args.methods for name in args.trainers]
    for name, method, seed in [] if args.table else plan:
        if (name, method, seed) in done:
            continue
        run = {"trainer": name, "method": method, "seed": seed} | dict(TRAINERS[name](setting, method, seed, args))
        with args.out.open("a") as lines:
            lines.write(json.dumps(run) + "\n")
        print(name, method, seed, run["held_out"], run["seconds"], flush=True)
    print(table(args.out))


if __name__ == "__main__":
    main()
