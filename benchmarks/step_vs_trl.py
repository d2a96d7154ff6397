"""A training step compared with TRL's GRPOTrainer: seconds, tokens per second, phases, peak memory, reward curves.

    OMP_NUM_THREADS=1 python benchmarks/step_vs_trl.py --case quickstart --trl-rows 128 64
    OMP_NUM_THREADS=1 python benchmarks/step_vs_trl.py --case wide --dead 0.4 --trl-rows 10 1 --budgets 16384 1024
    OMP_NUM_THREADS=1 python benchmarks/step_vs_trl.py --curves --steps 40 --seeds 0 1 2 --jobs 2

Each side is a process of its own that waits for its turn: the sides take steps in turn, in another order every round.
Both compute the same objective (Dr. GRPO, no scaling, clips 0.2 and 0.28, no KL, truncated rollouts kept) with the same
model, prompts, sampling, batch, optimiser (fused AdamW) and precision (float32). TRL runs without gradient
checkpointing, without a reference and without logging; `--trl-rows` are the rows of its micro-batches, `--budgets` the
padded tokens of ours: several of each run side by side, and ratios are to the fastest of TRL.

`quickstart`: the packaged policy, 16 prompts × 8 responses of at most 64 tokens, really sampled, TRL with
Transformers' `generate`, ours with `HFEngine`. `wide`: a random-weight trunk of 31 million parameters with Qwen3's
vocabulary (151,936, tied) on seeded responses of 64-256 tokens, 5 prompts × 2, the same on all sides; `--dead` is the
share of groups without a right row. `tiny` is a small version of `wide` for quick checks. `0.6b` is Qwen3-0.6B with
random weights in bfloat16 (both optimisers on these, without masters) on 8 responses of 2,048 tokens, for
`--device cuda`; `half` is a small version of it. `benchmarks/gpu_check.py` runs it.

Seconds are of the wall, CPU seconds of the side's own process; ratios are medians over rounds. With `--curves` rewards
of both sides over seeds instead, step by step on the same prompts.
"""

import argparse
import importlib.metadata
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from stand_in import (
    SHAPES,
    StandInEngine,
    StandInTask,
    Turns,
    Worker,
    random_qwen3,
    stand_in_responses,
    take_turns,
)  # fmt: skip

from grail_lightning.answers import find_boxes
from grail_lightning.batch import Sampling
from grail_lightning.credit import Uniform
from grail_lightning.data import ArithmeticData
from grail_lightning.module import GrailModule
from grail_lightning.policy import Loading, Policy, load_policy
from grail_lightning.step.options import Execution, Objective
from grail_lightning.tasks.base import Prompt

OURS, TRL = "ours", "TRL"
PHASES = ("sample", "grade", "update")


@dataclass(frozen=True)
class Case:
    """The setting of both sides."""

    name: str
    prompts: int
    group_size: int
    limit: int
    shortest: int = 0
    learning_rate: float = 1e-4
    trunk: str | None = None
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    def policy(self) -> Policy:
        """A fresh copy of the weights that both sides start from."""
        if self.trunk is None:
            return load_policy("arithmetic")
        policy = random_qwen3(**SHAPES[self.trunk]).to(getattr(torch, self.dtype))
        policy.loading = Loading(dtype=self.dtype, master_weights=False)
        return policy

    def batches(self, steps: int, seed: int) -> list[list[Prompt]]:
        """The prompts of each step."""
        number = steps * self.prompts
        if self.trunk is None:
            (problems,) = ArithmeticData(num_train=number * (seed + 1)).load("train")
            prompts = list(problems.prompts[number * seed :])
        else:
            task = StandInTask()
            prompts = [task.prompt({"problem": f"{10 + k % 80}+{10 + k % 80}\n"}) for k in range(number)]
        return [prompts[self.prompts * k : self.prompts * (k + 1)] for k in range(steps)]


CASES = {
    case.name: case
    for case in (
        Case("quickstart", prompts=16, group_size=8, limit=64),
        Case("wide", prompts=5, group_size=2, limit=256, shortest=64, learning_rate=1e-6, trunk="wide"),
        Case("tiny", prompts=5, group_size=3, limit=64, shortest=16, learning_rate=1e-6, trunk="tiny"),
        Case("0.6b", 2, 4, limit=2048, shortest=2048, learning_rate=1e-6, trunk="0.6b", dtype="bfloat16"),
        Case("half", 2, 4, limit=64, shortest=64, learning_rate=1e-6, trunk="tiny", dtype="bfloat16"),
    )
}


def work(case: Case, steps: int, seed: int, budget: int, chunk: int, dead: float) -> None:
    """The worker of our side."""
    turns = Turns(case.device)

    class Report(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            turns.begin()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            output = outputs["output"]
            turns.end(
                sample=output.metrics["time/sample"],
                grade=output.metrics["time/grade"],
                tokens=int(output.batch.response_mask.sum()),
                reward=output.metrics["reward"],
            )

    module = GrailModule(
        "arithmetic",
        Sampling(max_response_length=case.limit),
        engine=None if case.trunk is None else StandInEngine(case.shortest, dead=dead),
        objective=Objective(mask_truncated=False),
        execution=Execution(group_size=case.group_size, token_budget=budget),
        credit=Uniform(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=case.learning_rate, weight_decay=0.0, fused=True),
    )
    module.policy = case.policy().train()
    if chunk:
        module.policy.loading = replace(module.policy.loading, chunk_tokens=chunk)
    pl.seed_everything(seed, verbose=False)
    loader = torch.utils.data.DataLoader(case.batches(steps, seed), batch_size=None)
    pl.Trainer(
        max_epochs=1, accelerator="cpu" if case.device == "cpu" else "gpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Report()],
        precision="bf16-true" if case.dtype == "bfloat16" else "32-true",
    ).fit(module, loader)  # fmt: skip


class Watched:
    """Goes before TRL's GRPOTrainer and keeps the seconds of sampling, and of sampling with scoring."""

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


class TakeTurns:
    """Goes before Transformers' TrainerCallback and takes turns at optimiser steps."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: Watched | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.turns.begin()

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
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
        case, lengths = self.case, (self.case.shortest, self.case.limit)
        made = stand_in_responses(
            self.tokenizer, case.prompts, case.group_size, lengths, seed=self.calls, dead=self.dead
        )
        self.calls += 1
        return {"prompt_ids": self.tokenizer(prompts)["input_ids"], "completion_ids": made, "logprobs": None}


def trl_config(case: Case, rows: int, steps: int, seed: int, folder: str):
    """One optimiser step for each sampling, in micro-batches of `rows`; nothing that costs time and can be left out."""
    from trl import GRPOConfig

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
    )


def work_of_trl(case: Case, steps: int, seed: int, rows: int, dead: float) -> None:
    """The worker of TRL's side: GRPOTrainer set to its fastest, of which nothing but the sampler is replaced.

    The sampler is replaced by `rollout_func`, its own hook, in the cases with given responses.
    """
    turns = Turns(case.device)
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    policy = case.policy()
    prompts = [prompt for batch in case.batches(steps, seed) for prompt in batch]
    given = None if case.trunk is None else Given(case, policy.tokenizer, dead)
    report = type("Report", (TakeTurns, TrainerCallback), {})(turns)
    with tempfile.TemporaryDirectory() as folder:
        report.trainer = type("Trainer", (Watched, GRPOTrainer), {})(
            model=policy.model,
            reward_funcs=right_box,
            args=trl_config(case, rows, steps, seed, folder),
            train_dataset=Dataset.from_list([{"prompt": p.messages, "reference": p.reference} for p in prompts]),
            processing_class=policy.tokenizer,
            callbacks=[report],
            rollout_func=given,
        )
        report.trainer.train()


@dataclass(frozen=True)
class Side:
    """A program and its setting: rows of a micro-batch for TRL, padded tokens of one for us."""

    program: str
    setting: int
    chunk: int = 0

    def __str__(self) -> str:
        if self.program == TRL:
            return f"TRL, {self.setting} rows a micro-batch"
        return f"ours, {self.setting} tokens" + (f", chunks of {self.chunk}" if self.chunk else "")

    def command(self, case: Case, steps: int, seed: int, dead: float) -> list[str]:
        words = {"case": case.name, "worker": self.setting, "steps": steps, "seeds": seed}
        words |= {"dead": dead, "device": case.device}
        words |= {"program": self.program, "chunks": self.chunk}
        return [sys.executable, str(Path(__file__)), *(f"--{name}={value}" for name, value in words.items())]


def take(case: Case, sides: list[Side], rounds: int, warm_up: int, dead: float) -> dict[Side, list[dict[str, float]]]:
    """The laps of all sides in turn."""
    workers = [Worker(str(side), side.command(case, rounds + warm_up, 0, dead)) for side in sides]
    return dict(zip(sides, take_turns(workers, rounds, warm_up), strict=True))


def alternate(case: Case, sides: list[Side], rounds: int, warm_up: int, dead: float) -> None:
    """All sides in turn, a few rounds to warm up; prints their medians."""
    laps = take(case, sides, rounds, warm_up, dead)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    print(f"\n{case.name}, dead {dead:g}, {rounds} rounds, {case.rows} rows a step; {versions}\n")
    print("| side | step s | CPU s | sample | grade | update | tokens/s | MiB | step / TRL | CPU | update | peak |")
    print("|---|" + "--:|" * 11)
    for line in _table(laps):
        print(line)
    print(flush=True)


def _table(laps: dict[Side, list[dict[str, float]]]) -> Iterator[str]:
    peers = [side for side in laps if side.program == TRL]
    fastest = min(peers, key=lambda side: _median(laps[side], "step"), default=None)
    for side, mine in laps.items():
        speed = statistics.median(lap["tokens"] / lap["step"] for lap in mine)
        cells = [f"{_median(mine, name):.2f}" for name in ("step", "cpu", *PHASES)]
        cells += [f"{speed:.0f}", f"{mine[-1]['peak']:.0f}"]
        if fastest is not None and side.program == OURS:
            pairs = list(zip(mine, laps[fastest], strict=True))
            for name in ("step", "cpu", "update"):
                # Ratios are taken within a round, so that a slow minute of the machine affects both sides.
                cells.append(f"{statistics.median(a[name] / b[name] for a, b in pairs):.2f}")
            cells.append(f"{mine[-1]['peak'] / laps[fastest][-1]['peak']:.2f}")
        else:
            cells += ["fastest" if side == fastest else "", "", "", ""]
        yield f"| {side} | {' | '.join(cells)} |"


def _median(laps: list[dict[str, float]], name: str) -> float:
    return statistics.median(lap[name] for lap in laps)


def curves(case: Case, sides: list[Side], steps: int, seeds: list[int], jobs: int) -> None:
    """Reward curves of both sides over seeds: the same prompts step by step, other random numbers."""

    def run(job: tuple[Side, int]) -> list[float]:
        worker = Worker(str(job[0]), job[0].command(case, steps, job[1], 0.0))
        rewards = [worker.step()["reward"] for _ in range(steps)]
        worker.close()
        return rewards

    pairs = [(side, seed) for seed in seeds for side in sides]
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(pairs, pool.map(run, pairs), strict=True))
    print(f"\n{case.name}: rewards over {steps} steps of {case.rows} rows\n")
    print(f"| seed | {' | '.join(f'{side.program}, first 10 | last 10' for side in sides)} | difference, last 10 |")
    print("|--:|" + "--:|" * 5)
    differences = []
    for seed in seeds:
        ours, theirs = (found[side, seed] for side in sides)
        differences.append([a - b for a, b in zip(ours[-10:], theirs[-10:], strict=True)])
        means = (statistics.mean(part) for curve in (ours, theirs) for part in (curve[:10], curve[-10:]))
        print(f"| {seed} | {' | '.join(f'{m:.3f}' for m in means)} | {statistics.mean(differences[-1]):+.3f} |")
    for what, sample in (
        ("seeds", [statistics.mean(d) for d in differences]),
        ("steps and seeds", [x for d in differences for x in d]),
    ):
        mean, half = interval(sample)
        print(f"\nmean difference {mean:+.3f}, 95 % interval ± {half:.3f} (t over the {len(sample)} {what})")


def interval(sample: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by Student's t."""
    from scipy import stats

    error = statistics.stdev(sample) / len(sample) ** 0.5
    return statistics.mean(sample), float(stats.t.ppf(0.975, len(sample) - 1)) * error


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options of the driver and of the workers."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="quickstart")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dead", type=float, default=0.0, help="share of dead groups (not of the quickstart)")
    parser.add_argument("--trl-rows", type=int, nargs="*", help="rows of TRL's micro-batches; default all")
    parser.add_argument("--budgets", type=int, nargs="*", default=[16384], help="padded tokens of our micro-batches")
    parser.add_argument("--chunks", type=int, nargs="*", default=[0], help="our `chunk_tokens`; 0 is the default")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--program", choices=[OURS, TRL], default=OURS, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    case = replace(CASES[options.case], device=options.device)
    if options.worker and options.program == TRL:
        return work_of_trl(case, options.steps, options.seeds[0], options.worker, options.dead)
    if options.worker:
        return work(case, options.steps, options.seeds[0], options.worker, options.chunks[0], options.dead)
    rows = [case.rows] if options.trl_rows is None else options.trl_rows
    mine = [Side(OURS, budget, chunk) for budget in options.budgets for chunk in options.chunks]
    sides = mine + [Side(TRL, number) for number in rows]
    if options.curves:
        return curves(case, [mine[0], Side(TRL, rows[-1])], options.steps, options.seeds, options.jobs)
    return alternate(case, sides, options.rounds, options.warm_up, options.dead)


if __name__ == "__main__":
    main()
