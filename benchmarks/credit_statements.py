"""The quality of credit at the statements of programs, in the generated world of functions.

    OMP_NUM_THREADS=1 python benchmarks/credit_statements.py --prompts 128
    OMP_NUM_THREADS=1 python benchmarks/credit_statements.py --prompts 256 --values benchmarks/values/code.npz

Samples programs of the packaged policy `code` for test problems, runs them in the sandbox, and compares each method's
weights with the labels of the task: a statement is flawed if it is the first whose replacement by that of the reference
makes all tests pass. This is not EGCA's own rule, which compares traces.

- *in rollout*: the probability that the flawed statement of a wrong program ranks above a sound one of it, by the
  largest weight among its tokens; ties count half. *at fork*: the same of two wrong programs of one problem that are
  equal up to this statement, at the first token in which they differ. Intervals: bootstrap over problems.
- *flawed*: the share of the blame (of the sum of absolute advantages in wrong programs) that is on flawed statements;
  that of uniform credit is their share of tokens.
- *rho (b)*, with `--values`: the rank correlation over the statements of a program with what each changes in the
  resampled rate of success: in wrong programs the loss, in right ones the gain.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from credit_gradients import resampled_subjects
from credit_programs import of_programs
from credit_quality import Verifier, respond, run
from credit_subjects import setting, subjects
from credit_truth import (
    ERRORS,
    KINDS,
    Lines,
    Table,
    World,
    column_names,
    credit_columns,
    forks,
    gain_columns,
    resamplings,
)
from credit_values import PROMPTS, kept_rollouts, read_values
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.engines import HFEngine
from grail_lightning.functional import group_advantages
from grail_lightning.grading import align_rows
from grail_lightning.policy import Policy, load_policy


def statement_gains(values: dict[str, np.ndarray], batch: RolloutBatch, lines: Lines) -> Tensor:
    """``[2, B, S]``: by how much each statement changes the value, the sum of `Q - V` over its tokens, by half."""
    advantage = resampled_subjects(values)["Q - V"]
    change = [advantage(half, 0, batch).cumsum(1) for half in (0, 1)]
    padded = [torch.nn.functional.pad(x, (1, 0)) for x in change]
    gains = torch.stack([x.gather(1, lines.stop) - x.gather(1, lines.begin) for x in padded])
    return gains.masked_fill(~lines.known, torch.nan)


def label_statements(batch: RolloutBatch, policy: Policy) -> Lines:
    """The statements of each program, with all of their tokens."""
    shape = len(batch), max(text.count("\n") + 1 for text in batch.texts)
    begin, stop = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    kind = {name: torch.zeros(shape, dtype=torch.bool) for name in KINDS}
    for b, (aligned, prompt) in enumerate(zip(align_rows(batch, policy.tokenizer), batch.prompts, strict=True)):
        for s, step in enumerate(prompt.task.label_steps(aligned.text, prompt) or []):
            tokens = aligned.overlapping(step.start, step.stop)
            if tokens:
                begin[b, s], stop[b, s], kind[step.kind][b, s] = tokens[0], tokens[-1] + 1, True
    return Lines(begin, stop, stop, kind)


def shares(weights: Tensor, flawed: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """``[G]`` each: the weight on flawed statements, and on all tokens, of the wrong programs of each problem."""
    weights = weights.abs().double() * (world.wrong & flawed.any(1))[:, None]
    return tuple(w.sum(1).reshape(-1, world.group_size).sum(1) for w in (weights * flawed, weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, help="test problems, or those of the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--values", type=Path, help="the file of benchmarks/credit_values.py, whose rollouts are taken")
    parser.add_argument("--only", nargs="+", default=[""], help="lines whose names contain one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where, policy = setting("code", 0, options.prompts, options.seed), load_policy("code").eval()
    engine, (problems,) = HFEngine(cache_tokens=50_000), where.data.load("test")
    engine.update_weights(policy)
    values = {}
    with Verifier() as verifier:
        if options.values:
            first = {k: x[: options.prompts // PROMPTS] for k, x in read_values(options.values).items()}
            values = {k: x.reshape(1, -1, *x.shape[2:]) for k, x in first.items()}
            (kept,) = kept_rollouts(values, where, policy, verifier, 1, options.prompts)
            batch = kept.with_advantages(group_advantages(kept.rewards, where.group_size))
        else:
            batch = respond(policy, engine, verifier, problems.prompts, where, options.seed)
    print(f"{options.prompts} prompts, {len(batch)} rollouts, {float(batch.correct.float().mean()):.3f} right")
    lines, wrong = label_statements(batch, policy), batch.advantages < 0
    world = World(
        batch=batch,
        group_size=where.group_size,
        lines=lines,
        kinds={},
        reasoning=batch.response_mask,
        forks={error: forks(batch, lines, wrong, error, where.group_size) for error in ERRORS},
        wrong=wrong,
        right=batch.advantages > 0,
        effect=torch.zeros(batch.response_mask.shape),
        gains=statement_gains(values, batch, lines) if values else torch.full((2, *lines.begin.shape), torch.nan),
    )
    counts = {e: (int((lines.kind[e] & wrong[:, None]).any(1).sum()), len(world.forks[e].line)) for e in ERRORS}
    print(f"{int(wrong.sum())} wrong ones of groups with both; rollouts with an error, and forks: {counts}")
    print("modes:", Counter(verdict.layer for verdict, bad in zip(batch.verdicts, wrong.tolist(), strict=True) if bad))
    flawed = torch.zeros_like(batch.response_mask)
    for b, s in (lines.kind["slip"] | lines.kind["misconception"]).nonzero().tolist():
        flawed[b, lines.begin[b, s] : lines.stop[b, s]] = True
    names = [name for name in column_names(world) if not name.startswith("rho (a)")]
    table = Table(resamplings(options.prompts, 2000, options.seed), compact=False, names=("flawed", *names))
    table.head()
    if values:
        table.row("resampled gain (b)", "score", gain_columns(world), 0.0)
    for subject in of_programs(subjects()):
        if any(part in subject.name for part in options.only):
            credit = run(subject, policy, batch, 4096, options.seed)
            columns = credit_columns(credit, world)
            if credit.weights is not None:
                columns["flawed"] = shares(credit.weights, flawed, world)
            table.row(subject.name, subject.by, columns, credit.seconds)
    problems.prompts[0].task.executor.close()


if __name__ == "__main__":
    main()
