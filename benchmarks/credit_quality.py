"""The quality of credit on labelled rollouts: every method, simple scorers, control experiments and the truth.

    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --terms 5 10 --compact
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --world words --compact
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --world search
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --world code --values benchmarks/values/code.npz
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --teachers

Samples responses of a packaged policy to test problems of its world as training would, computes each method's weights
in batches of 256 rollouts, and prints a table; docs/credit_quality.md explains its columns and reads it. The task
labels every step as sound, slip (wrong at random), misconception (wrong systematically) or inherited (right, but
computed from a wrong result). In the worlds of search and charts the labels are those of turns, and so is credit: a
turn has the mean of its tokens. With `--compact` the table has fewer methods, and detection, tokens and seconds alone.

In the world of code programs run in the sandbox, and a step is a statement: it is flawed if it is the first whose
replacement by that of the reference makes all tests pass. This is not EGCA's own rule, which compares traces. *flawed*
is the share of the blame (of the sum of absolute advantages in wrong programs) that is on flawed statements; that of
uniform credit is their share of tokens. What a statement changes is known with `--values` alone.

With `--teachers` the table is about the teachers of RLSD and SDPG, whose prompts show an answer, right or wrong: by the
log-ratio of each token, log P_teacher - log P, in the reasoning of wrong rollouts of groups with both outcomes. *By
chance* is what independent signs would give. In the lines *less* it is the difference of two teachers, from which what
any sentence in the prompt does drops out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import credit_truth as truth
import torch
from credit_subjects import (
    COMPACT,
    PAD_EFFECT,
    PROMPTS_PER_BATCH,
    Subject,
    TrainedPRIME,
    in_world,
    prime_subjects,
    respond,
    subjects,
)
from credit_truth import Credit, Table, World
from credit_values import GROUP_SIZE, PROMPTS, Lab, WorldName, open_lab, read_values, setting
from torch import Tensor

from grail_lightning import Policy, RolloutBatch
from grail_lightning.core.credit.base import TokenWeights, token_advantages
from grail_lightning.core.credit.oar import scoped_tokens
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.sampler import Sampler
from grail_lightning.credit import RLSD, CreditContext, SampledContinuations, TokenCredit
from grail_lightning.functional import group_advantages
from grail_lightning.gallery.continuations import Prefix
from grail_lightning.gallery.distillation import SENTENCE, with_shown_answers

TOKEN_BUDGET = 4096  # Padded tokens of a forward pass.
DRAWS = 2000  # Of the bootstrap over prompts.


def continuations(lab: Lab) -> SampledContinuations:
    """Those of methods that sample, in groups as large as those of the rollouts."""
    where = {"group_size": lab.setting.group_size, "sampling": lab.setting.sampling, "rank": 0}
    tools = {"policy": lab.policy, "engine": lab.engine, "verifier": lab.verifier}
    sampler = Sampler(**tools, **where, clock=PhaseClock(lab.policy.device))
    return Counted(lambda: sampler, lambda: 0)


class Counted(SampledContinuations):
    """Continuations that count what they draw."""

    places, continuations, tokens = 0, 0, 0

    def draw(
        self, batch: RolloutBatch, places: Sequence[Prefix], number: int, budget: int
    ) -> tuple[list[list[float] | None], int]:
        outcomes, tokens = super().draw(batch, places, number, budget)
        drawn = sum(one is not None for one in outcomes)
        self.places, self.continuations = self.places + drawn, self.continuations + drawn * number
        self.tokens += tokens
        return outcomes, tokens


def run(
    subject: Subject, policy: Policy, batch: RolloutBatch, seed: int, source: SampledContinuations | None = None
) -> Credit:
    """Apply a subject to all rollouts, in batches as large as the published ones."""
    ranks, weights = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    seconds = []
    services = {} if source is None else {SampledContinuations: source}
    for rows in torch.split(torch.arange(len(batch)), PROMPTS_PER_BATCH * len(batch) // len(batch.group.unique())):
        piece = batch.select(rows)
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit"))
        context = CreditContext(step=0, generator=generator, token_budget=TOKEN_BUDGET, services=services)
        start = time.process_time()
        credit = subject.method(policy, piece, context)
        if isinstance(credit, TokenWeights) and subject.control is not None:
            credit = subject.control(credit, piece, context)
        seconds.append((time.process_time() - start) / len(piece) * 1000)
        columns = piece.response_mask.shape[1]
        score = credit.scores if isinstance(credit, TokenWeights) else credit
        if isinstance(credit, TokenWeights):
            weights[rows, :columns] = effective(credit, piece)
        chosen = score if subject.by == "score" else weights[rows, :columns]
        assert chosen is not None
        ranks[rows, :columns] = chosen.to(ranks.dtype)
    bare = not isinstance(subject.method, TokenCredit)
    return Credit(ranks=ranks, weights=None if bare else weights, seconds=statistics.median(seconds))


def effective(credit: TokenWeights, batch: RolloutBatch) -> Tensor:
    """``[B, T]``: each token's advantage over its rollout's; zero on rows without one."""
    total = token_advantages(batch.advantages, credit)
    return torch.where(batch.advantages[:, None] != 0, total / batch.advantages[:, None], 0)


# --- teachers ---------------------------------------------------------------------------------------------------------


def log_probabilities(policy: Policy, batch: RolloutBatch) -> Tensor:
    """``[B, T, V]``: of all tokens at each place of the responses."""
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    width = batch.response_mask.shape[1]
    return logits[:, -width - 1 : -1].float().log_softmax(-1)


@torch.no_grad()
def teachers(policy: Policy, batch: RolloutBatch) -> dict[str, Tensor]:
    """``[2, B, T]`` by the answer that the teacher is shown: the log-ratios, and the products of the pulls.

    The pull is ``π (log π_teacher - log π + KL)``, SDPG's descent direction on the logits; its product is that with the
    pull towards the teacher with the right answer.
    """
    right = [prompt.reference for prompt in batch.prompts]
    answers = {
        "right": right,
        "another problem's": [next(a for a in [*right[k:], *right] if a != right[k]) for k in range(len(right))],
        "the rollout's own": [verdict.prediction or "?" for verdict in batch.verdicts],
        "?": ["?"] * len(right),
    }
    gaps = {name: torch.zeros(2, *batch.response_mask.shape) for name in answers}
    for rows in torch.arange(len(batch)).split(64):
        piece = batch.select(rows)
        student, pulls = log_probabilities(policy, piece), {}
        for name, shown in answers.items():
            told = [replace(p, reference=shown[k]) for p, k in zip(piece.prompts, rows.tolist(), strict=True)]
            told_piece = with_shown_answers(policy, piece.replace(prompts=told), SENTENCE)
            ratio = log_probabilities(policy, told_piece) - student
            pulls[name] = student.exp() * (ratio - (student.exp() * ratio).sum(-1, keepdim=True))
            own = ratio.gather(-1, piece.response_ids[..., None])[..., 0]
            gaps[name][:, rows, : own.shape[1]] = torch.stack([own, (pulls[name] * pulls["right"]).sum(-1)])
    return gaps


def show_teachers(world: World, policy: Policy, table: Table) -> None:
    """Print the table of `--teachers`."""
    found, inside = teachers(policy, world.batch), scoped_tokens(world.batch, "reasoning") & world.wrong[:, None]
    right, energy = found["right"]

    def total(values: Tensor) -> Tensor:
        return truth.by_prompt((values * inside).sum(1), world)[0]

    def detected(scores: Tensor) -> list[str]:
        columns = truth.credit_columns(Credit(ranks=scores, weights=None, seconds=0.0), world)
        return [truth.over_prompts(columns[name], table.draws) for name in table.columns]

    columns = "above 0", "same sign", "by chance", "rho", "pull", *table.columns
    print(f"| answer shown | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
    for name, (gap, product) in found.items():
        up, expected = gap > 0, right > 0
        p, q = (float(x[inside].double().mean()) for x in (up, expected))
        sums = [(total(up), total(inside)), (total(up == expected), total(inside))]
        sums += [truth.by_prompt(truth.rank_correlation(gap, right, inside), world), (total(product), total(energy))]
        cells = [truth.over_prompts(each, table.draws) for each in sums]
        cells.insert(2, f"{p * q + (1 - p) * (1 - q):.2f}")
        cells += detected((-gap).exp().clamp(1 - RLSD.clip, 1 + RLSD.clip))
        print(f"| {' | '.join([name, *cells])} |", flush=True)
    for name in [*found][1:]:
        print(f"| right less {name} |{' |' * 5} {' | '.join(detected(found[name][0] - right))} |")


# --- the table --------------------------------------------------------------------------------------------------------


def observe_programs(lab: Lab, options: argparse.Namespace) -> World:
    """Programs, sampled or from a file, with the labels of their statements and by `--values` what these change."""
    if options.values:
        first = {k: x[: options.prompts // PROMPTS] for k, x in read_values(options.values).items()}
        values = {k: x.reshape(1, -1, *x.shape[2:]) for k, x in first.items()}
        (stored,) = lab.stored_rollouts(values, 1, options.prompts)
        batch = stored.with_advantages(group_advantages(stored.rewards.float(), options.group_size))
    else:
        batch = respond(lab, lab.setting.data.load("test")[0].prompts, options.seed)
    lines, wrong = truth.label_lines(batch, lab.policy, whole=True), batch.advantages < 0
    modes = Counter(verdict.layer for verdict, bad in zip(batch.verdicts, wrong.tolist(), strict=True) if bad)
    print(f"{len(batch)} rollouts, {float(batch.correct.float().mean()):.3f} right; modes of wrong ones: {modes}")
    gains = (
        truth.gains_of_file(values, batch, lines) if options.values else torch.full((2, *lines.begin.shape), torch.nan)
    )
    errors = (lines.kind["slip"] | lines.kind["misconception"])[..., None]
    flawed = (lines.tokens(batch.response_mask.shape[1]) & errors).any(1)
    every = torch.ones_like(wrong)
    return truth.world_of(batch, lab, lines, every, truth.ERRORS, kinds={}, effect=None, gains=gains, flawed=flawed)


def observe(lab: Lab, options: argparse.Namespace) -> tuple[World, Credit | None, float]:
    """Rollouts with both truths about them; the pad effect as a subject; seconds for resampling 1,000 rollouts.

    A compact table needs no truth.
    """
    start = time.process_time()
    batch = respond(lab, lab.setting.data.load("test")[0].prompts, options.seed)
    seconds = time.process_time() - start
    print(f"{options.prompts} prompts, {len(batch)} rollouts, sampled in {seconds:.1f} s", flush=True)
    one_turn = batch.turn is None
    lines = truth.label_lines(batch, lab.policy) if one_turn else truth.label_turns(batch)
    boxed = batch.answer.whole.any(1)
    rows = (boxed & (batch.advantages != 0)).nonzero().flatten()
    rows = rows[rows < (0 if options.compact else options.counterfactual_prompts) * options.group_size]
    start, seed = time.process_time(), derive_seed(options.seed, "counterfactual")
    gains = truth.gains_of_lines(lab, batch, lines, rows, options.samples, seed)
    seconds = time.process_time() - start
    measured, effect = int((~gains[0].isnan()).any(1).sum()), None
    if not options.compact:
        print(f"(b): {measured} rollouts of groups with both outcomes, {options.samples} samples, {seconds:.0f} s")
        if one_turn:
            effect = replace(run(PAD_EFFECT, lab.policy, batch, options.seed), weights=None)
    errors = truth.ERRORS if one_turn else (truth.BAD_TURN,)
    truths = {"kinds": truth.regions(batch, lab.policy), "effect": effect and effect.ranks, "gains": gains}
    world = truth.world_of(batch, lab, lines, boxed, errors, **truths)
    return world, effect, seconds / max(measured, 1) * 1000


def describe(world: World, policy: Policy) -> None:
    """The numbers of rollouts behind the columns."""
    kind, wrong = world.lines.kind, world.wrong[:, None]
    print(f"{int(world.wrong.sum())} wrong and {int(world.right.sum())} right rollouts of groups with both outcomes")
    for error, pairs in world.forks.items():
        rows = int(((kind[error] & wrong).any(1) & (kind["sound"] & wrong).any(1)).sum())
        prompts = len(set((pairs.row[0] // world.group_size).tolist()))
        sound = Counter(world.batch.response_ids[pairs.row[1], pairs.token].tolist()).most_common(1)
        often = "".join(f"; the sound token is {policy.tokenizer.decode([token])!r} at {n}" for token, n in sound)
        print(f"{error}: beside a sound line in {rows} rollouts; {len(pairs.line)} forks, {prompts} prompts{often}")


def show(lab: Lab, options: argparse.Namespace) -> None:
    """One table."""
    print(f"\n{lab.setting.title}, policy `{lab.setting.policy}`", flush=True)
    programs = options.world == "code"
    world, effect, seconds = (observe_programs(lab, options), None, 0.0) if programs else observe(lab, options)
    describe(world, lab.policy)
    draws = truth.resamplings(options.prompts, DRAWS, options.seed)
    table = Table(draws, world.columns(compact=options.compact), options.compact)
    if options.teachers:
        show_teachers(world, lab.policy, table)
        return
    table.head()
    if not world.gains.isnan().all():
        table.row("resampled gain (b)", "score", truth.gain_columns(world), seconds)
    if effect is not None:
        table.row(PAD_EFFECT.name, "score", truth.credit_columns(effect, world), effect.seconds)
    extra, ours = [], int(world.batch.response_mask.sum())
    every = in_world([*subjects(), *([] if programs else prime_subjects(lab, options.seed))], options.world)
    every = [s for s in every if any(part in s.name for part in options.only)]
    for subject in [s for s in every if s.name in COMPACT] if options.compact else every:
        source = continuations(lab)
        credit = run(subject, lab.policy, world.batch, options.seed, source)
        table.row(subject.name, subject.by, truth.credit_columns(credit, world), credit.seconds, source.tokens / ours)
        if isinstance(subject.method, TrainedPRIME):
            extra.append(f"{subject.name}: loss and accuracy of each batch before its step: {subject.method.figures}")
        if source.tokens:
            drawn = f"{source.continuations} continuations from {source.places} places, {source.tokens} tokens"
            extra.append(f"{subject.name}: {drawn}, beside {ours} of the rollouts")
    print("\n".join(extra))
    if programs:
        world.batch.prompts[0].task.executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=get_args(WorldName), default="chains", help="what the problems are")
    parser.add_argument("--terms", type=int, nargs="+", default=[5], help="of chains; a table for each number")
    parser.add_argument("--compact", action="store_true", help="fewer methods and columns, neither truth (a) nor (b)")
    parser.add_argument("--teachers", action="store_true", help="what teachers owe to the answer in their prompt")
    parser.add_argument("--prompts", type=int, default=256, help="test problems, or those of the file")
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="rollouts of a problem")
    parser.add_argument("--counterfactual-prompts", type=int, default=64, help="of those, resampled at each line")
    parser.add_argument("--samples", type=int, default=32, help="continuations of each beginning; even")
    parser.add_argument("--values", type=Path, help="a file of benchmarks/credit_values.py, whose programs are taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="lines whose name contains one of these; default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    options.compact |= options.teachers
    for terms in options.terms if options.world == "chains" else [0]:
        where = setting(options.world, terms, options.prompts, options.seed)
        with open_lab(replace(where, group_size=options.group_size)) as lab:
            show(lab, options)
    print(f"whole run: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
