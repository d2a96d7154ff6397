"""The quality of credit on labelled rollouts: every method, simple scorers, control experiments and the truth.

    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --terms 5 10 --compact
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --world words --compact
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --world search
    OMP_NUM_THREADS=1 python benchmarks/credit_quality.py --teachers

Samples responses of a packaged policy to test problems of its world as training would, computes each method's weights
in batches of 256 rollouts, and prints a table; docs/credit_quality.md explains its columns and reads it. The task
labels every step as sound, slip (wrong at random), misconception (wrong systematically) or inherited (right, but
computed from a wrong result). In the worlds of search and charts the labels are those of turns, and so is credit: a
turn has the mean of its tokens. With `--compact` the table has fewer methods, and detection, tokens and seconds alone.

With `--teachers` the table is about the teachers of RLSD and SDPG, whose prompts show an answer, right or wrong: by the
log-ratio of each token, log P_teacher - log P, in the reasoning of wrong rollouts of groups with both outcomes.

- *above 0*: the share of positive ones. *same sign*: of those with the sign that they have with the right answer; *by
  chance*: what independent signs would give. *rho*: the rank correlation with those of the right answer.
- *pull*: SDPG's descent direction on the logits, projected on that of the right answer: 1 is the same.
- *in rollout*, *at fork*: as in the other table, by RLSD's weight; in the lines *less*, by the difference of two
  teachers, from which what any sentence in the prompt does drops out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from credit_subjects import (
    COMPACT,
    GROUP_SIZE,
    PAD_EFFECT,
    Setting,
    Subject,
    TrainedPRIME,
    setting,
    subjects,
    with_turns,
)
from credit_truth import (  # fmt: skip
    BAD_TURN,
    ERRORS,
    Credit,
    Table,
    World,
    by_prompt,
    column_names,
    credit_columns,
    forks,
    gain_columns,
    label_lines,
    label_turns,
    over_prompts,
    rank_correlation,
    regions,
    resamplings,
)
from credit_values import Resampling, graded_responses
from torch import Tensor

from grail_lightning.answers import Verifier
from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import RLSD, CreditContext, TokenCredit
from grail_lightning.credit.base import Continuations, Place, TokenWeights, token_advantages
from grail_lightning.credit.distillation import SENTENCE, with_shown_answers
from grail_lightning.engines import HFEngine
from grail_lightning.functional import group_advantages
from grail_lightning.policy import Policy, load_policy
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.continuations import SampledContinuations
from grail_lightning.step.sampler import Sampler
from grail_lightning.tasks.base import Prompt

PROMPTS_PER_BATCH = 32
PRIME_BATCHES = 16


def respond(
    policy: Policy, engine: HFEngine, verifier: Verifier, prompts: Sequence[Prompt], where_from: Setting, seed: int
) -> RolloutBatch:
    """Graded responses to problems, with the advantages of training: rewards less the mean of the group."""
    graded = graded_responses(policy, engine, verifier, prompts, where_from, seed)
    return graded.with_advantages(group_advantages(graded.rewards, where_from.group_size))


def sampler(policy: Policy, engine: HFEngine, verifier: Verifier, where_from: Setting) -> Sampler:
    """Of continuations, in groups as large as those of the rollouts."""
    return Sampler(
        policy=policy,
        engine=engine,
        verifier=verifier,
        group_size=where_from.group_size,
        sampling=where_from.sampling,
        clock=PhaseClock(policy.device),
        rank=0,
    )


def prime_subjects(engine: HFEngine, verifier: Verifier, where_from: Setting, seed: int) -> list[Subject]:
    """PRIME with its reward model trained on training problems, beside the same with permuted outcomes."""

    def rollouts(policy: Policy) -> Iterator[RolloutBatch]:
        engine.update_weights(policy)
        (problems,) = where_from.data.load("train")
        for number in range(PRIME_BATCHES):
            some = problems.prompts[number * PROMPTS_PER_BATCH : (number + 1) * PROMPTS_PER_BATCH]
            own = derive_seed(seed, "PRIME", number)
            yield respond(policy, engine, verifier, some, where_from, own)

    def trained(**options: Any) -> TrainedPRIME:
        return TrainedPRIME(rollouts, **options)

    return [
        Subject(name="PRIME", method=trained()),
        Subject(name="PRIME, permuted", method=trained(permuted=True)),
        Subject(name="PRIME, token reward", method=trained().token_reward, by="score"),
        Subject(name="PRIME, token reward, permuted", method=trained(permuted=True).token_reward, by="score"),
    ]


# --- running the methods ----------------------------------------------------------------------------------------------


class Counted(SampledContinuations):
    """Continuations that count what they draw."""

    places, continuations, tokens = 0, 0, 0

    def draw(
        self, batch: RolloutBatch, places: Sequence[Place], number: int, budget: int
    ) -> tuple[list[list[float] | None], int]:
        found, tokens = super().draw(batch, places, number, budget)
        drawn = sum(one is not None for one in found)
        self.places, self.continuations = self.places + drawn, self.continuations + drawn * number
        self.tokens += tokens
        return found, tokens


def run(
    subject: Subject,
    policy: Policy,
    batch: RolloutBatch,
    token_budget: int,
    seed: int,
    source: Continuations | None = None,
) -> Credit:
    """Apply a subject to all rollouts, in batches as large as the published ones."""
    ranks, weights = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    seconds = []
    bare = not isinstance(subject.method, TokenCredit)
    for rows in torch.split(torch.arange(len(batch)), PROMPTS_PER_BATCH * len(batch) // len(batch.group.unique())):
        piece = batch.select(rows)
        generator = torch.Generator().manual_seed(derive_seed(seed, "credit"))
        context = CreditContext(step=0, generator=generator, token_budget=token_budget, continuations=source)
        start = time.process_time()
        found = subject.method(policy, piece, context)
        if isinstance(found, TokenWeights) and subject.control is not None:
            found = subject.control(found, piece, context)
        seconds.append((time.process_time() - start) / len(piece) * 1000)
        columns = piece.response_mask.shape[1]
        score = found.scores if isinstance(found, TokenWeights) else found
        if isinstance(found, TokenWeights):
            weights[rows, :columns] = effective(found, piece)
        chosen = score if subject.by == "score" else weights[rows, :columns]
        assert chosen is not None
        ranks[rows, :columns] = chosen.to(ranks.dtype)
    return Credit(ranks=ranks, weights=None if bare else weights, seconds=statistics.median(seconds))


def effective(found: TokenWeights, batch: RolloutBatch) -> Tensor:
    """``[B, T]``: each token's advantage over its rollout's; zero on rows without one."""
    total = token_advantages(batch.advantages, found)
    return torch.where(batch.advantages[:, None] != 0, total / batch.advantages[:, None], 0)


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
    found = {name: torch.zeros(2, *batch.response_mask.shape) for name in answers}
    for rows in torch.arange(len(batch)).split(64):
        piece = batch.select(rows)
        student, pulls = log_probabilities(policy, piece), {}
        for name, shown in answers.items():
            told = [replace(p, reference=shown[k]) for p, k in zip(piece.prompts, rows.tolist(), strict=True)]
            told_piece = with_shown_answers(policy, piece.replace(prompts=told), SENTENCE)
            ratio = log_probabilities(policy, told_piece) - student
            pulls[name] = student.exp() * (ratio - (student.exp() * ratio).sum(-1, keepdim=True))
            own = ratio.gather(-1, piece.response_ids[..., None])[..., 0]
            found[name][:, rows, : own.shape[1]] = torch.stack([own, (pulls[name] * pulls["right"]).sum(-1)])
    return found


def show_teachers(world: World, policy: Policy, table: Table) -> None:
    """Print the table of `--teachers`."""
    found, inside = teachers(policy, world.batch), world.reasoning & world.wrong[:, None]
    right, energy = found["right"]

    def cell(totals: Tensor, counts: Tensor) -> str:
        return str(over_prompts(totals, counts, table.draws))

    def total(values: Tensor) -> Tensor:
        return by_prompt((values * inside).sum(1), world)[0]

    def detected(scores: Tensor) -> list[str]:
        columns = credit_columns(Credit(ranks=scores, weights=None, seconds=0.0), world)
        return [cell(*columns[name]) for name in table.columns]

    columns = "above 0", "same sign", "by chance", "rho", "pull", *table.columns
    print(f"| answer shown | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
    for name, (gap, product) in found.items():
        up, expected = gap > 0, right > 0
        p, q = (float(x[inside].double().mean()) for x in (up, expected))
        cells = [cell(total(up), total(inside)), cell(total(up == expected), total(inside))]
        cells += [f"{p * q + (1 - p) * (1 - q):.2f}", cell(*by_prompt(rank_correlation(gap, right, inside), world))]
        cells += [cell(total(product), total(energy)), *detected((-gap).exp().clamp(1 - RLSD.clip, 1 + RLSD.clip))]
        print(f"| {' | '.join([name, *cells])} |", flush=True)
    for name in [*found][1:]:
        print(f"| right less {name} |{' |' * 5} {' | '.join(detected(found[name][0] - right))} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--world", choices=["chains", "words", "search", "charts"], default="chains", help="what the problems are"
    )
    parser.add_argument("--terms", type=int, nargs="+", default=[5], help="of chains; a table for each number")
    parser.add_argument("--policy", help="a folder or another packaged policy; default the one of the world")
    parser.add_argument("--compact", action="store_true", help="fewer methods and columns, neither truth (a) nor (b)")
    parser.add_argument("--teachers", action="store_true", help="what teachers owe to the answer in their prompt")
    parser.add_argument("--prompts", type=int, default=256, help="test problems")
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="rollouts of a problem")
    parser.add_argument("--counterfactual-prompts", type=int, default=64, help="of those, resampled at each line")
    parser.add_argument("--samples", type=int, default=32, help="continuations of each beginning; even")
    parser.add_argument("--counterfactual-seconds", type=float, default=600, help="begin no more prompts after that")
    parser.add_argument("--token-budget", type=int, default=4096, help="padded tokens of a forward pass")
    parser.add_argument("--draws", type=int, default=2000, help="of the bootstrap over prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="lines whose name contains one of these; default all")
    return parser.parse_args()


def observe(policy: Policy, where_from: Setting, options: argparse.Namespace) -> tuple[World, Credit | None, float]:
    """Rollouts with both truths about them; the pad effect as a subject; seconds for resampling 1,000 rollouts.

    A compact table needs no truth.
    """
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    with Verifier() as verifier:
        start = time.process_time()
        (problems,) = where_from.data.load("test")
        batch = respond(policy, engine, verifier, problems.prompts, where_from, options.seed)
        print(
            f"{options.prompts} prompts, {len(batch)} rollouts, sampled in {time.process_time() - start:.1f} s",
            flush=True,
        )
        resampling = Resampling(
            policy=policy,
            engine=engine,
            verifier=verifier,
            sampling=where_from.sampling,
            num_samples=options.samples,
            seed=derive_seed(options.seed, "counterfactual"),
        )
        lines = label_lines(batch, policy) if batch.turn is None else label_turns(batch)
        boxed = batch.answer.whole.any(1)
        rows = (boxed & (batch.advantages != 0)).nonzero().flatten()
        rows = rows[rows < (0 if options.compact else options.counterfactual_prompts) * where_from.group_size]
        start = time.process_time()
        gains, done = resampling.gains_within(batch, lines, rows, where_from.group_size, options.counterfactual_seconds)
        seconds = time.process_time() - start
    measured = int((~gains[0].isnan()).any(1).sum())
    if not options.compact:
        print(
            f"(b): {measured} rollouts of {done} prompts with both outcomes, {options.samples} samples, "
            f"{seconds:.0f} s",
            flush=True,
        )
    effect = None
    if not options.compact and batch.turn is None:
        effect = run(PAD_EFFECT, policy, batch, options.token_budget, options.seed)
    kinds, reasoning = regions(batch, policy)
    wrong, errors = boxed & (batch.advantages < 0), ERRORS if batch.turn is None else (BAD_TURN,)
    world = World(
        batch=batch,
        group_size=where_from.group_size,
        lines=lines,
        kinds=kinds,
        reasoning=reasoning,
        forks={error: forks(batch, lines, wrong, error, where_from.group_size) for error in errors},
        wrong=wrong,
        right=boxed & (batch.advantages > 0),
        effect=torch.zeros(batch.response_mask.shape) if effect is None else effect.ranks,
        gains=gains,
    )
    return world, effect, seconds / max(measured, 1) * 1000


def describe(world: World, policy: Policy) -> None:
    """The numbers of rollouts behind the columns."""
    kind, wrong = world.lines.kind, world.wrong[:, None]
    print(f"{int(world.wrong.sum())} wrong and {int(world.right.sum())} right rollouts of groups with both, boxed")
    for error in world.forks:
        rows = (kind[error] & wrong).any(1) & (kind["sound"] & wrong).any(1)
        pairs = world.forks[error]
        prompts = len(set((pairs.row[0] // world.group_size).tolist()))
        sound = Counter(world.batch.response_ids[pairs.row[1], pairs.token].tolist()).most_common(1)
        often = "".join(f"; the sound token is {policy.tokenizer.decode([token])!r} at {n}" for token, n in sound)
        print(
            f"{error}: beside a sound line in {int(rows.sum())} rollouts; {len(pairs.line)} forks, {prompts} prompts"
            f"{often}"
        )


def chosen(every: Sequence[Subject], options: argparse.Namespace) -> list[Subject]:
    """The lines that were asked for."""
    asked = [s for s in every if any(part in s.name for part in options.only)]
    return [s for s in asked if s.name in COMPACT] if options.compact else asked


def show(where_from: Setting, options: argparse.Namespace) -> None:
    """One table."""
    policy = load_policy(where_from.policy).eval()
    print(f"\n{where_from.title}, policy `{where_from.policy}`", flush=True)
    world, effect, seconds = observe(policy, where_from, options)
    describe(world, policy)
    table = Table(resamplings(options.prompts, options.draws, options.seed), options.compact, column_names(world))
    if options.teachers:
        show_teachers(world, policy, table)
        return
    table.head()
    if not options.compact:
        table.row("resampled gain (b)", "score", gain_columns(world), seconds)
    if effect is not None:
        table.row(PAD_EFFECT.name, "score", credit_columns(effect, world), effect.seconds)
    engine, extra, ours = HFEngine(cache_tokens=50_000), [], int(world.batch.response_mask.sum())
    with Verifier() as verifier:
        every = [*subjects(), *prime_subjects(engine, verifier, where_from, options.seed)]
        every = every if world.batch.turn is None else with_turns(every)
        for subject in chosen(every, options):
            source = Counted(sampler(policy, engine, verifier, where_from), step=0)
            credit = run(subject, policy, world.batch, options.token_budget, options.seed, source)
            columns = credit_columns(credit, world)
            table.row(subject.name, subject.by, columns, credit.seconds, source.tokens / ours)
            if isinstance(subject.method, TrainedPRIME):
                figures = subject.method.figures
                extra.append(f"{subject.name}: loss and accuracy of each batch before its step: {figures}")
            if source.tokens:
                extra.append(
                    f"{subject.name}: {source.continuations} continuations from {source.places} places, "
                    f"{source.tokens} tokens, beside {ours} of the rollouts"
                )
    print("\n".join(extra))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    options.compact |= options.teachers
    for terms in options.terms if options.world == "chains" else [0]:
        where_from = setting(options.world, terms, options.prompts, options.seed)
        show(replace(where_from, policy=options.policy or where_from.policy, group_size=options.group_size), options)
    print(f"whole run: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
