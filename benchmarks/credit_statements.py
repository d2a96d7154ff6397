"""The quality of credit at the statements of programs, in the generated world of functions.

    OMP_NUM_THREADS=1 python benchmarks/credit_statements.py --prompts 128

Samples programs of the packaged policy `code` for test problems, runs them in the sandbox, and compares each method's
weights with the labels of the task: a statement is flawed if it is the first whose replacement by that of the reference
makes all tests pass. This is not EGCA's own rule, which compares traces.

- *in rollout*: the probability that the flawed statement of a wrong program ranks above a sound one of it, by the
  largest weight among its tokens; ties count half. *at fork*: the same of two wrong programs of one problem that are
  equal up to this statement, at the first token in which they differ. Intervals: bootstrap over problems.
- *flawed*: the share of the blame (of the sum of absolute advantages in wrong programs) that is on flawed statements;
  behind the methods the share of tokens that is there.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import torch
from credit_quality import Setting, Verifier, respond, run
from credit_subjects import Subject, entropy, negative_logprob
from credit_truth import ERRORS, KINDS, Lines, Table, World, credit_columns, forks, over_prompts, resamplings
from torch import Tensor

from grail_lightning.batch import RolloutBatch, Sampling
from grail_lightning.credit import EGCA, GRAIL, OARGradient, Oracle, PermutedRewards, TreeAdvantage, Uniform
from grail_lightning.data import CodeData
from grail_lightning.engines import HFEngine
from grail_lightning.grading import align_rows, answer_masks
from grail_lightning.policy import Policy, load_policy
from grail_lightning.tasks import CodeTask


def subjects(task: CodeTask) -> list[Subject]:
    """The lines of the table."""

    def explaining(part: str, method: GRAIL | OARGradient):
        def score(policy, batch, context):
            task.explained = part
            answer = answer_masks(batch, align_rows(batch, policy.tokenizer))
            return method(policy, batch.replace(answer=answer), context).scores

        return score

    return [
        Subject(name="-log p", method=negative_logprob, by="score"),
        Subject(name="entropy", method=entropy, by="score"),
        Subject(name="Uniform", method=Uniform()),
        *(
            Subject(name=f"{type(method).__name__}, {part}", method=explaining(part, method), by="score")
            for method in (GRAIL(gate="all", answer_overwrite="never"), OARGradient())
            for part in ("return", "program")
        ),
        Subject(name="TreeAdvantage", method=TreeAdvantage()),
        Subject(name="TreeAdvantage, permuted rewards", method=PermutedRewards(TreeAdvantage())),
        *(
            Subject(name=f"EGCA, {blamed}", method=EGCA(blamed=blamed))
            for blamed in ("divergent", "random", "last", "permuted")
        ),
        Subject(name="Oracle (the labels)", method=Oracle()),
    ]


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
    return Lines(begin, stop, kind)


def shares(weights: Tensor, flawed: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """``[G]`` each: the weight on flawed statements, and on all tokens, of the wrong programs of each problem."""
    weights = weights.abs().double() * (world.wrong & flawed.any(1))[:, None]
    return tuple(w.sum(1).reshape(-1, world.group_size).sum(1) for w in (weights * flawed, weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, help="test problems")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a problem")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, policy = CodeData(num_test=options.prompts, seed=options.seed), load_policy("code").eval()
    where = Setting(title="functions", policy="code", data=data, sampling=Sampling(max_response_length=80))
    engine, (problems,) = HFEngine(cache_tokens=50_000), data.load("test")
    engine.update_weights(policy)
    task = problems.prompts[0].task
    with Verifier() as verifier:
        batch = respond(
            policy, engine, verifier, problems.prompts, replace(where, group_size=options.group_size), options.seed
        )
    print(f"{options.prompts} prompts, {len(batch)} rollouts, {float(batch.correct.float().mean()):.3f} right")
    lines, wrong = label_statements(batch, policy), batch.advantages < 0
    none = torch.zeros(batch.response_mask.shape)
    world = World(
        batch=batch,
        group_size=options.group_size,
        lines=lines,
        kinds={},
        reasoning=batch.response_mask,
        forks={error: forks(batch, lines, wrong, error, options.group_size) for error in ERRORS},
        wrong=wrong,
        right=batch.advantages > 0,
        effect=none,
        gains=torch.full((2, *lines.begin.shape), torch.nan),
    )
    counts = {e: (int((lines.kind[e] & wrong[:, None]).any(1).sum()), len(world.forks[e].line)) for e in ERRORS}
    print(f"{int(wrong.sum())} wrong ones of groups with both; rollouts with an error, and forks: {counts}")
    print("modes:", Counter(verdict.layer for verdict, bad in zip(batch.verdicts, wrong.tolist(), strict=True) if bad))
    flawed = torch.zeros_like(batch.response_mask)
    for b, s in (lines.kind["slip"] | lines.kind["misconception"]).nonzero().tolist():
        flawed[b, lines.begin[b, s] : lines.stop[b, s]] = True
    table = Table(resamplings(options.prompts, 2000, options.seed), compact=True)
    table.head()
    for subject in subjects(task):
        credit = run(subject, policy, batch, 4096, options.seed)
        table.row(subject.name, subject.by, credit_columns(credit, world), credit.seconds)
        if credit.weights is not None:
            print(f"    flawed: {over_prompts(*shares(credit.weights, flawed, world), table.draws)}", flush=True)
    uniform = shares(batch.response_mask.float(), flawed, world)
    print(f"tokens on flawed statements: {over_prompts(*uniform, table.draws)}")
    task.executor.close()


if __name__ == "__main__":
    main()
