"""A training step compared with TRL's GRPOTrainer, and with earlier versions: seconds, phases, tokens, peak memory.

    OMP_NUM_THREADS=1 python benchmarks/step_vs_trl.py --case quickstart --trl-rows 128 64
    OMP_NUM_THREADS=1 python benchmarks/step_vs_trl.py --case wide --dead 0.4 --trl-rows 10 1 --budgets 16384 1024
    git worktree add /tmp/before b1ce412
    OMP_NUM_THREADS=1 python benchmarks/step_vs_trl.py --case smollm2 --policy FOLDER --before /tmp/before --trl-rows

Each side is a process of its own that waits for its turn: the sides take steps in turn, in another order every round.
Both compute the same objective (Dr. GRPO, no scaling, clips 0.2 and 0.28, no KL, truncated rollouts kept) with the same
model, prompts, sampling, batch, optimiser (fused AdamW) and precision (float32). TRL runs without gradient
checkpointing, without a reference and without logging; `--trl-rows` are the rows of its micro-batches, none leaves it
out; `--budgets` are the padded tokens of ours, `--before` the working trees of earlier versions, from b1ce412 on:
several of each run side by side, and ratios are to the fastest of TRL, without TRL to the last side.

`quickstart`: the packaged policy, 16 prompts × 8 responses of at most 64 tokens, really sampled, TRL with
Transformers' `generate`, ours with `HFEngine`. `wide`: a random-weight trunk of 31 million parameters with Qwen3's
vocabulary (151,936, tied) on seeded responses of 64-256 tokens, 5 prompts × 2, the same on all sides; `tiny` is a small
version of it. `0.6b`, for `--device cuda`: Qwen3-0.6B with random weights in bfloat16 (both optimisers on these,
without masters) on 8 responses of 2,048 tokens, `0.6b-uneven` on 8 of 256 to 2,048; `half` is a small version of it.
`smollm2`: SmolLM2-135M-Instruct on 8 problems of the kind of configs/smollm2.yaml behind three worked examples × 8
responses in two mini-batches; a response is rewarded by the parity of its number of characters, so that nearly every
group has two rewards.

Seconds are of the wall, CPU seconds of the side's own process; ratios are medians over rounds. Peak memory is what
PyTorch has allocated on a GPU; on a CPU it is the largest resident size over that before the first step (weights
loaded, no gradients yet).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import lightning.pytorch as pl
import torch
from credit_cost import SHAPES, StandInEngine, StandInTask, random_qwen3, stand_in_responses

from grail_lightning import (
    ArithmeticData,
    DrGRPO,
    Execution,
    FewShot,
    GrailModule,
    Loading,
    Policy,
    Prompt,
    Sampling,
    WordProblemData,
)
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import Uniform
from grail_lightning.worlds.words.task import WordProblemSpace

TRL = "TRL"
Laps = dict["Side", list[dict[str, float]]]


class Parity(StandInTask):
    """Rewards responses with an even number of characters."""

    def reward(self, texts, prompts, verdicts):
        return [float(len(text) % 2 == 0) for text in texts]


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
    mini_batches: int = 1
    policy_name: str = "arithmetic"
    dead: float = 0.0

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    def policy(self) -> Policy:
        """A fresh copy of the weights that both sides start from."""
        if self.trunk is None:
            return load_policy(self.policy_name)
        policy = random_qwen3(**SHAPES[self.trunk]).to(getattr(torch, self.dtype))
        policy.loading = Loading(dtype=self.dtype, master_weights=False)
        return policy

    def batches(self, steps: int) -> list[list[Prompt]]:
        """The prompts of each step."""
        number = steps * self.prompts
        if self.name == "smollm2":
            space, examples = WordProblemSpace(max_steps=2, largest=10), FewShot(number=3)
            data = WordProblemData(num_train=number, problems=space, few_shot=examples)
            data.setup("fit")
            whole = [prompt for batch in data.train_dataloader() for prompt in batch]
            prompts = [Prompt(messages=p.messages, reference="0", task=Parity()) for p in whole]
        elif self.trunk is None:
            prompts = list(ArithmeticData(num_train=number).load("train")[0].prompts)
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
        Case("0.6b-uneven", 2, 4, limit=2048, shortest=256, learning_rate=1e-6, trunk="0.6b", dtype="bfloat16"),
        Case("half", 2, 4, limit=64, shortest=64, learning_rate=1e-6, trunk="tiny", dtype="bfloat16"),
        Case("smollm2", 8, 8, limit=40, learning_rate=1e-5, mini_batches=2),
    )
}


# --- turns ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A program and its setting: rows of a micro-batch for TRL, padded tokens of one for ours."""

    program: str  # TRL, or the working tree of a version of this package, "ours" for this one.
    setting: int

    def __str__(self) -> str:
        return f"{self.program}, {self.setting} {'rows a micro-batch' if self.program == TRL else 'tokens'}"


class Turns:
    """The worker's end of the pipe: it waits for its turn and reports the seconds and the memory of its step."""

    def __init__(self, pipe: Connection, device: str) -> None:
        self.pipe, self.cuda = pipe, device == "cuda"
        self.before: float | None = None
        self.start = self.start_cpu = 0.0

    def begin(self) -> None:
        try:
            self.pipe.recv()
        except EOFError:  # The driver has ended.
            os._exit(1)
        if self.before is None:
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            else:
                Path("/proc/self/clear_refs").write_text("5")  # The peak of loading does not count.
            self.before = 0.0 if self.cuda else resident("VmRSS")
        self.start, self.start_cpu = self.now(), time.process_time()

    def end(self, *, sample: float, grade: float, tokens: int) -> None:
        """Everything but sampling and grading is the update; credit is none on both sides."""
        seconds, cpu = self.now() - self.start, time.process_time() - self.start_cpu
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.cuda else resident("VmHWM")
        lap = {"step": seconds, "cpu": cpu, "sample": sample, "grade": grade, "update": seconds - sample - grade}
        self.pipe.send(lap | {"tokens": tokens, "peak": peak - self.before})

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def resident(field: str) -> float:
    """In MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


WORKER = """
import sys
from multiprocessing.connection import Connection
from step_vs_trl import Case, Side, work
pipe = Connection(int(sys.argv[1]))
side, case, steps = pipe.recv()
work(Side(**side), Case(**case), steps, pipe)
"""
"""The program of a side's process. The names that it uses are in each version from b1ce412 on."""


def start(side: Side, case: Case, steps: int) -> Connection:
    """The driver's end of the pipe to a new process of a side. An earlier version runs its own copy of this script."""
    pipe, theirs = multiprocessing.Pipe()
    tree = Path(__file__).resolve().parent.parent if side.program in (TRL, "ours") else Path(side.program)
    paths = filter(None, [str(tree), str(tree / "benchmarks"), os.environ.get("PYTHONPATH")])
    process = [sys.executable, "-P", "-c", WORKER, str(theirs.fileno())]
    subprocess.Popen(process, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, pass_fds=[theirs.fileno()])
    theirs.close()
    pipe.send((asdict(side), asdict(case), steps))
    return pipe


def take_turns(case: Case, sides: list[Side], rounds: int, warm_up: int = 1) -> Laps:
    """The laps of each side, in rounds that begin with another one each time. Rounds to warm up do not count."""
    pipes = {side: start(side, case, rounds + warm_up) for side in sides}
    laps: Laps = {side: [] for side in sides}
    try:
        for number in range(rounds + warm_up):
            turn = number % len(sides)
            for side in [*sides[turn:], *sides[:turn]]:
                pipes[side].send("go")
                laps[side].append(pipes[side].recv())
    except (EOFError, ConnectionError):
        raise SystemExit(f"{side} stopped; its last words are above") from None
    finally:
        for pipe in pipes.values():
            pipe.close()
    return {side: own[warm_up:] for side, own in laps.items()}


def work(side: Side, case: Case, steps: int, pipe: Connection) -> None:
    """The process of a side."""
    os.dup2(2, 1)  # The output of libraries is no part of the table.
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    run = train_with_trl if side.program == TRL else train
    run(case, steps, side.setting, Turns(pipe, case.device))


def train(case: Case, steps: int, budget: int, turns: Turns) -> None:
    """Our side."""

    class Report(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            turns.begin()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            metrics, sampled = outputs["output"].metrics, outputs["output"].batch.response_mask
            seconds = {phase: metrics[f"time/{phase}"] for phase in ("sample", "grade")}
            turns.end(**seconds, tokens=int(sampled.sum()))

    module = GrailModule(
        "arithmetic",
        Sampling(max_response_length=case.limit),
        engine=None if case.trunk is None else StandInEngine(case.shortest, dead=case.dead),
        objective=DrGRPO(clip_high=0.28),
        execution=Execution(group_size=case.group_size, token_budget=budget, mini_batches=case.mini_batches),
        credit=Uniform(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=case.learning_rate, weight_decay=0.0, fused=True),
    )
    module.policy = case.policy().train()
    pl.seed_everything(0, verbose=False)
    pl.Trainer(
        max_epochs=1, accelerator="cpu" if case.device == "cpu" else "gpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Report()],
        precision="bf16-true" if case.dtype == "bfloat16" else "32-true",
    ).fit(module, torch.utils.data.DataLoader(case.batches(steps), batch_size=None))  # fmt: skip


# --- TRL --------------------------------------------------------------------------------------------------------------


def right_box(completions, reference, **_):
    """1 where the last box holds the reference."""
    answers = [StandInTask().answer(text) or "" for text in completions]
    return [float(answer.strip() == wanted) for answer, wanted in zip(answers, reference, strict=True)]


def given_responses(case: Case, tokenizer):
    """The seeded responses, one set for each call, as TRL's `rollout_func`."""
    calls, sizes = count(), (case.prompts, case.group_size, (case.shortest, case.limit))

    def rollouts(prompts, trainer):
        made = stand_in_responses(tokenizer, *sizes, seed=next(calls), dead=case.dead)
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": made, "logprobs": None}

    return rollouts


def trl_config(case: Case, rows: int, steps: int, folder: str):
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
        seed=0,
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


def train_with_trl(case: Case, steps: int, rows: int, turns: Turns) -> None:
    """TRL's side: GRPOTrainer set to its fastest, of which nothing but the sampler is replaced.

    The sampler is replaced by `rollout_func`, its own hook, in the cases with given responses.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Trainer(GRPOTrainer):
        """Keeps the seconds of sampling, and of scoring."""

        def _generate(self, prompts):
            start = time.perf_counter()
            made = super()._generate(prompts)
            self.sampling, self.tokens = time.perf_counter() - start, sum(len(ids) for ids in made[1])
            return made

        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            self.scoring = time.perf_counter() - start - self.sampling
            return made

    class Report(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            turns.begin()

        def on_step_end(self, args, state, control, **kwargs):
            turns.end(sample=trainer.sampling, grade=trainer.scoring, tokens=trainer.tokens)

    policy = case.policy()
    torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default, which `Policy` changes.
    prompts = [prompt for batch in case.batches(steps) for prompt in batch]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=policy.model,
            reward_funcs=right_box,
            args=trl_config(case, rows, steps, folder),
            train_dataset=Dataset.from_list([{"prompt": p.messages, "reference": p.reference} for p in prompts]),
            processing_class=policy.tokenizer,
            callbacks=[Report()],
            rollout_func=None if case.trunk is None else given_responses(case, policy.tokenizer),
        )
        trainer.train()


# --- the table --------------------------------------------------------------------------------------------------------


def table(laps: Laps) -> Iterator[str]:
    """A line for each side, with ratios to the fastest of TRL, or to the last side."""

    def median(side: Side, name: str) -> float:
        return statistics.median(lap[name] for lap in laps[side])

    base = min([side for side in laps if side.program == TRL] or [[*laps][-1]], key=lambda side: median(side, "step"))
    for side, mine in laps.items():
        speed = statistics.median(lap["tokens"] / lap["step"] for lap in mine)
        cells = [f"{median(side, name):.2f}" for name in ("step", "cpu", "sample", "grade", "update")]
        cells += [f"{speed:.0f}", f"{mine[-1]['peak']:.0f}"]
        # Ratios are taken within a round, so that a slow minute of the machine affects both sides.
        pairs = list(zip(mine, laps[base], strict=True))
        ratios = [statistics.median(a[name] / b[name] for a, b in pairs) for name in ("step", "cpu", "update")]
        ratios.append(mine[-1]["peak"] / laps[base][-1]["peak"])
        cells += ["base", "", "", ""] if side == base else [f"{ratio:.2f}" for ratio in ratios]
        yield f"| {side} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=["quickstart"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dead", type=float, default=0.0, help="share of dead groups among given responses")
    parser.add_argument("--trl-rows", type=int, nargs="*", help="rows of TRL's micro-batches; default all")
    parser.add_argument("--budgets", type=int, nargs="*", default=[16384], help="padded tokens of our micro-batches")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="working trees of earlier versions")
    parser.add_argument("--policy", default="arithmetic", help="a folder, of the case smollm2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    programs = ["ours", *(str(tree.resolve()) for tree in options.before)]
    ours = [Side(program, budget) for program in programs for budget in options.budgets]
    for name in options.case:
        case = replace(CASES[name], device=options.device, policy_name=options.policy, dead=options.dead)
        rows = [case.rows] if options.trl_rows is None else options.trl_rows
        laps = take_turns(case, ours + [Side(TRL, number) for number in rows], options.rounds)
        print(f"\n{name}, dead {case.dead:g}, {options.rounds} rounds, {case.rows} rows a step\n")
        heads = "step s | CPU s | sample | grade | update | tokens/s | MiB | step / base | CPU | update | peak"
        print(f"| side | {heads} |\n|---|{'--:|' * 11}")
        print("\n".join(table(laps)), flush=True)


if __name__ == "__main__":
    main()
