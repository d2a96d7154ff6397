"""Values of states by resampling, at every token that was a choice: the truth that credit methods are measured against.

    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE                     # sums of five terms, 35 minutes
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --world words       # 26 minutes
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --terms 10          # 7 hours
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --world search      # of turns, half a minute a batch
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --world charts      # the same
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --world code --batches 32 --samples 32

The rollouts are those of benchmarks/credit_gradients.py with the same options, which reads FILE. A token is a choice if
the policy gave it a probability below 1 - 1e-3; a token that is none moves the value by at most that. From the state
before each choice `--samples` continuations are sampled and graded, in two independent halves. In a world of several
turns, values are those of the states before each turn: the environment answers to the turns before once more. FILE is
written after every batch, and a second call goes on where the first one ended.

Shapes: ``N`` batches, ``B`` rows, ``T`` response tokens; 2 halves.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from credit_subjects import Setting, Turns, WorldName, play_from, setting
from credit_truth import Lines
from torch import Tensor

from grail_lightning.answers import Verifier
from grail_lightning.batch import GradedBatch, RolloutBatch, SampledBatch, Sampling
from grail_lightning.credit.base import CreditContext
from grail_lightning.credit.measure import gradient_energies, measure_logits
from grail_lightning.credit.tree import prefix_path
from grail_lightning.credit.turns import turn_table
from grail_lightning.engines import HFEngine, RolloutEngine
from grail_lightning.engines.base import build_batch, decode
from grail_lightning.functional.certainty import repeat_probability
from grail_lightning.functional.turns import sum_by_turn, turn_numbers, turn_starts
from grail_lightning.grading import grade_and_locate, grade_answers
from grail_lightning.picture import FIRST_PICTURE_ID
from grail_lightning.policy import Policy, load_policy
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.tasks import EnvironmentTask
from grail_lightning.tasks.base import Prompt, TokenText

PROMPTS = 16  # A batch of the quickstart.
SAMPLES = 64
TURN_SAMPLES = 32  # The same of a turn.
CERTAIN = 1e-3
TOKEN_BUDGET = 1024
WIDTH = 320  # Columns of a file with rollouts of several turns.
ROLLOUTS_PER_CALL = 2048


def continued(
    policy: Policy,
    verifier: Verifier,
    places: Sequence[tuple[Prompt, Turns]],
    number: int,
    sampling: Sampling,
    seed: int,
) -> Iterator[tuple[SampledBatch, Tensor]]:
    """`number` rollouts from each place, the places in several calls: rollouts, and ``[P, number]`` whether right."""
    size = max(1, ROLLOUTS_PER_CALL // number)
    for k in range(0, len(places), size):
        prompts, begun = zip(*places[k : k + size], strict=True)
        given = [turns for turns in begun for _ in range(number)]
        drawn = play_from(policy, prompts, given, sampling, derive_seed(seed, k))
        verdicts = grade_answers(drawn.texts, drawn.prompts, verifier)
        right = torch.tensor([verdict.correct for verdict in verdicts]).float()
        yield drawn, right.reshape(len(prompts), number)


def beginning(batch: SampledBatch, row: int, stop: int) -> tuple[int, ...] | Turns:
    """The ids of a row in front of a column; in a rollout of several turns those that were sampled, turn by turn."""
    ids = batch.response_ids[row, :stop]
    if batch.turn is None:
        return tuple(ids.tolist())
    numbers = turn_numbers(batch.response_mask, batch.turn)[row, :stop]
    return tuple(tuple(ids[numbers == k].tolist()) for k in range(int(numbers.max()) + 1 if stop else 0))


def without_pictures(policy: Policy, ids: Tensor) -> Tensor:
    """The ids with that of a picture's place for each picture token, whose own ids are those of a run."""
    place = 0 if policy.vision is None else policy.vision.pictures.place_id
    return ids.masked_fill(ids >= FIRST_PICTURE_ID, place)


def graded_responses(
    policy: Policy, engine: HFEngine, verifier: Verifier, prompts: Sequence[Prompt], where_from: Setting, seed: int
) -> GradedBatch:
    """Graded responses to problems."""
    key = derive_seed(seed, "rollouts")
    if isinstance(prompts[0].task, EnvironmentTask):
        batch = play_from(policy, prompts, [()] * len(prompts) * where_from.group_size, where_from.sampling, key)
    else:
        batch = engine.generate(list(prompts), where_from.group_size, where_from.sampling, key)
    return grade_and_locate(batch, verifier, policy.tokenizer)


def batches(
    policy: Policy, engine: HFEngine, verifier: Verifier, where_from: Setting, number: int, seed: int
) -> Iterator[GradedBatch]:
    """Graded rollouts of different training problems."""
    (problems,) = where_from.data.load("train")
    for k in range(number):
        prompts = problems.prompts[k * PROMPTS : (k + 1) * PROMPTS]
        yield graded_responses(policy, engine, verifier, prompts, where_from, derive_seed(seed, "batch", k))


def choices(policy: Policy, batch: GradedBatch) -> tuple[Tensor, Tensor]:
    """``[B, T]`` each: tokens that were a choice, and the probability that two draws at their place are equal."""
    context = CreditContext(step=0, generator=torch.Generator(), token_budget=TOKEN_BUDGET)
    own, repeated = measure_logits(policy, batch, context, torch.arange(len(batch)), repeat_probability)
    return batch.response_mask & (own < 1 - CERTAIN), repeated


def resampled_values(
    policy: Policy,
    engine: HFEngine,
    verifier: Verifier,
    where_from: Setting,
    batch: GradedBatch,
    seed: int,
    samples: int = SAMPLES,
) -> tuple[Tensor, Tensor]:
    r"""``[B, T, 2]`` each, NaN where a token was no choice: ``V`` and ``b*`` of the state before the token.

    .. math:: V(s) = E_a[Q(s, a)], \qquad b^*(s) = E_a[W(s, a) Q(s, a)] / E_a[W(s, a)], \qquad
              W(s, a) = 1 - 2 \pi(a) + \sum_v \pi(v)^2

    ``W`` is the squared norm of the gradient of a token's log-probability with respect to its logits.
    """
    chosen, repeated = choices(policy, batch)
    states = prefix_path(batch)[:, :-1]  # Before each token.
    places: dict[int, tuple[int, int]] = {}
    for row, column in chosen.nonzero().tolist():
        places.setdefault(int(states[row, column]), (row, column))
    by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, column in places.values():
        by_length[column].append((row, column))
    figures: dict[int, tuple[Tensor, Tensor]] = {}
    for length, some in sorted(by_length.items()):
        asked = []
        for row, column in some:
            ids = batch.response_ids[row, :column].tolist()
            prompt = batch.prompts[row]
            tokens = TokenText(policy.tokenizer.decode(ids), [*policy.encode(prompt.messages), *ids])
            asked.append(replace(prompt, messages=tokens))
        limit = where_from.sampling.max_response_length - length
        drawn = engine.generate(
            asked, samples, replace(where_from.sampling, max_response_length=limit), derive_seed(seed, length)
        )
        assert drawn.sampling_logprobs is not None
        whole = [
            policy.tokenizer.decode([*batch.response_ids[row, :column].tolist(), *ids], skip_special_tokens=True)
            for k, (row, column) in enumerate(some)
            for ids in (
                drawn.response_ids[k * samples + j][drawn.response_mask[k * samples + j]].tolist()
                for j in range(samples)
            )
        ]
        verdicts = grade_answers(whole, [batch.prompts[row] for row, _ in some for _ in range(samples)], verifier)
        right = torch.tensor([float(verdict.correct) for verdict in verdicts]).reshape(len(some), 2, -1)
        first = drawn.sampling_logprobs[:, 0].exp().reshape(len(some), 2, -1)
        for k, (row, column) in enumerate(some):
            weight = (1 - 2 * first[k] + repeated[row, column]).clamp(min=1e-8)
            best = (weight * right[k]).sum(-1) / weight.sum(-1)
            figures[int(states[row, column])] = right[k].mean(-1), best
    values = torch.full((2, *chosen.shape, 2), torch.nan)
    for row, column in chosen.nonzero().tolist():
        values[0, row, column], values[1, row, column] = figures[int(states[row, column])]
    return values[0], values[1]


def values_of_turns(
    policy: Policy, verifier: Verifier, where_from: Setting, batch: GradedBatch, seed: int
) -> tuple[Tensor, Tensor]:
    """`resampled_values` at the first token of each turn; ``W`` is that of a turn, the sum over its tokens."""
    turns, states = turn_table(batch), prefix_path(batch)[:, :-1]
    starts = turn_starts(turns.numbers, turns.exists.shape[1])
    borders = [(row, k, int(starts[row, k])) for row, k in turns.exists.nonzero().tolist()]
    owner = {int(states[row, column]): (row, k, column) for row, k, column in reversed(borders)}
    places = [(batch.prompts[row], beginning(batch, row, column)) for row, _, column in owner.values()]
    context = CreditContext(step=0, generator=torch.Generator(), token_budget=TOKEN_BUDGET)
    numbers = iter([k for _, k, _ in owner.values()])
    found = []
    for drawn, right in continued(policy, verifier, places, TURN_SAMPLES, where_from.sampling, seed):
        own = turn_table(drawn)
        first = torch.tensor([next(numbers) for _ in right]).repeat_interleave(TURN_SAMPLES)[:, None]
        # Many continuations begin with the same turn: one of them stands for all.
        stops = turn_starts(own.numbers, own.exists.shape[1] + 1).gather(1, first + 1).flatten().tolist()
        ends = [(int(row), beginning(drawn, row, stop)) for row, stop in enumerate(stops)]
        same: dict[object, int] = {}
        alike = torch.tensor([same.setdefault((row // TURN_SAMPLES, turns), row) for row, turns in ends])
        energy = gradient_energies(policy, drawn, context, torch.tensor([*same.values()]))
        weight = sum_by_turn(energy, own.numbers, own.exists.shape[1]).gather(1, first)[alike, 0].clamp(min=1e-8)
        halves, weight = (x.reshape(len(right), 2, -1) for x in (right, weight))
        found.append(torch.stack([halves.mean(-1), (weight * halves).sum(-1) / weight.sum(-1)]))
    figures = dict(zip(owner, torch.cat(found, 1).unbind(1), strict=True))
    values = torch.full((2, *states.shape, 2), torch.nan)
    for row, _, column in borders:
        values[:, row, column] = figures[int(states[row, column])].to(values)
    return values[0], values[1]


def kept_rollouts(
    values: dict[str, np.ndarray],
    where_from: Setting,
    policy: Policy,
    verifier: Verifier,
    number: int,
    size: int = PROMPTS,
) -> list[GradedBatch]:
    """The rollouts that a file holds, `size` problems a batch, graded again: another processor would sample others."""
    (problems,) = where_from.data.load("train")
    pad, end = policy.tokenizer.pad_token_id, policy.tokenizer.eos_token_id
    rollouts = []
    for k, rows in enumerate(values["ids"][:number].tolist()):
        prompts = problems.prompts[k * size : (k + 1) * size]
        responses = [[token for token in row if token != pad] for row in rows]
        if "turn" in values:
            owned = [zip(row, turn, strict=True) for row, turn in zip(rows, values["turn"][k].tolist(), strict=True)]
            split = [groupby((pair for pair in row if pair[1] >= 0), itemgetter(1)) for row in owned]
            given = [tuple(tuple(token for token, _ in turn) for _, turn in row) for row in split]
            sampled = play_from(policy, prompts, given, where_from.sampling, 0)
            ids = without_pictures(policy, sampled.response_ids)
            valid = [ids[row, :n].tolist() for row, n in enumerate(sampled.valid_lengths.tolist())]
            assert valid == responses  # The environment has answered as before.
        else:
            finished = [row[-1] == end for row in responses]
            sampled = build_batch(policy, prompts, len(rows) // len(prompts), responses, finished)
        graded = grade_and_locate(sampled, verifier, policy.tokenizer)
        assert graded.rewards.tolist() == values["rewards"][k].tolist()
        rollouts.append(graded)
    return rollouts


def read_values(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, each with the batch as its first dimension: ids, rewards, value and best."""
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}


Start = tuple[int, tuple[int, ...] | Turns]
"""A row whose prompt is meant (the first of its group), and its `beginning`."""


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Continues responses from given places."""

    policy: Policy
    engine: RolloutEngine
    verifier: Verifier
    sampling: Sampling  # Of the responses themselves: its limit holds for beginning and continuation together.
    num_samples: int  # The number of continuations of each beginning.
    seed: int

    def outcomes(self, batch: RolloutBatch, starts: Iterable[Start]) -> dict[Start, Tensor]:
        """Whether each continuation ends right: ``[N]`` float for each beginning."""
        if batch.turn is not None:
            some = sorted(set(starts))
            asked = [(batch.prompts[row], turns) for row, turns in some]
            key = derive_seed(self.seed, some[0][0])
            drawn = continued(self.policy, self.verifier, asked, self.num_samples, self.sampling, key)
            return dict(zip(some, torch.cat([right for _, right in drawn]), strict=True))
        by_length: dict[int, list[Start]] = defaultdict(list)
        for start in sorted(set(starts)):
            by_length[len(start[1])].append(start)
        found: dict[Start, Tensor] = {}
        for length, some in by_length.items():
            owners = [batch.prompts[row] for row, _ in some]
            texts = [decode(self.policy, list(ids)) for _, ids in some]
            # A beginning keeps its sampled tokens: another tokenisation would be another context.
            prompts = [
                replace(owner, messages=TokenText(text, [*self.policy.encode(owner.messages), *ids]))
                for owner, text, (_, ids) in zip(owners, texts, some, strict=True)
            ]
            rest = replace(self.sampling, max_response_length=self.sampling.max_response_length - length)
            key = derive_seed(self.seed, some[0][0], length)
            drawn = self.engine.generate(prompts, self.num_samples, rest, key)
            whole = [texts[k // self.num_samples] + text for k, text in enumerate(drawn.texts)]
            asked = [owners[k // self.num_samples] for k in range(len(whole))]
            right = torch.tensor([v.correct for v in grade_answers(whole, asked, self.verifier)]).float()
            found |= dict(zip(some, right.reshape(len(some), -1), strict=True))
        return found

    def gains(self, batch: RolloutBatch, lines: Lines, rows: Tensor, group_size: int) -> Tensor:
        """The effect of each line on the success rate: the rate after it minus the rate before it.

        "Before" is the position before the result's first token, "after" is `Lines.after`. ``[2, B, S]``: by the first
        half of the samples and by the second; NaN where nothing was measured.
        """
        gains = torch.full((2, *lines.begin.shape), torch.nan)
        places: list[tuple[int, int, Start, Start]] = []
        for b in rows.tolist():
            prompt = b - b % group_size
            for s in lines.known[b].nonzero().flatten().tolist():
                before, after = (beginning(batch, b, int(x[b, s])) for x in (lines.begin, lines.after))
                places.append((b, s, (prompt, before), (prompt, after)))
        found = self.outcomes(batch, [start for place in places for start in place[2:]])
        for b, s, begun, ended in places:
            gain = found[ended] - found[begun]
            gains[:, b, s] = gain[: gain.numel() // 2 * 2].reshape(2, -1).mean(1)
        return gains

    def gains_within(
        self, batch: RolloutBatch, lines: Lines, rows: Tensor, group_size: int, seconds: float
    ) -> tuple[Tensor, int]:
        """`gains`, group by group in the order of `rows`, until the time is up; and how many groups that were."""
        gains = torch.full((2, *lines.begin.shape), torch.nan)
        groups = sorted(set((rows // group_size).tolist()))
        end, done = time.perf_counter() + seconds, 0
        for some in (groups[k : k + 16] for k in range(0, len(groups), 16)):
            if time.perf_counter() > end:
                break
            chosen = rows[torch.isin(rows // group_size, torch.tensor(some))]
            gains = torch.where(gains.isnan(), self.gains(batch, lines, chosen, group_size), gains)
            done += len(some)
        return gains, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--world", choices=get_args(WorldName), default="chains")
    parser.add_argument("--terms", type=int, default=5, help="of chains")
    parser.add_argument("--batches", type=int, default=64, help=f"of {PROMPTS} problems")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each state, an even number; not of turns")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    where_from = setting(options.world, options.terms, options.batches * PROMPTS, options.seed)
    policy = load_policy(where_from.policy).eval()
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    arrays = read_values(options.file) if options.file.exists() else {}
    done = len(arrays["rewards"]) if arrays else 0
    with Verifier() as verifier, torch.no_grad():
        rollouts = batches(policy, engine, verifier, where_from, options.batches, options.seed)
        for number, batch in enumerate(rollouts):
            if number < done:
                continue
            begun = time.perf_counter()
            seed = derive_seed(options.seed, "values", number)
            if batch.turn is None:
                value, best = resampled_values(policy, engine, verifier, where_from, batch, seed, options.samples)
                extra, width = {}, where_from.sampling.max_response_length
            else:
                value, best = values_of_turns(policy, verifier, where_from, batch, seed)
                extra, width = {"turn": turn_numbers(batch.response_mask, batch.turn)}, WIDTH
            missing = width - batch.response_ids.shape[1]
            assert missing >= 0
            fresh = {
                "ids": torch.nn.functional.pad(without_pictures(policy, batch.response_ids), (0, missing)).short(),
                **{name: torch.nn.functional.pad(x, (0, missing), value=-1).char() for name, x in extra.items()},
                "rewards": batch.rewards.half(),
                **{
                    name: torch.nn.functional.pad(figure, (0, 0, 0, missing), value=torch.nan).half()
                    for name, figure in (("value", value), ("best", best))
                },
            }
            arrays = {
                name: np.concatenate([*([arrays[name]] if name in arrays else []), figure.numpy()[None]])
                for name, figure in fresh.items()
            }
            partial = options.file.with_suffix(".partial.npz")
            np.savez_compressed(partial, **arrays)
            partial.replace(options.file)
            right, made = float(batch.rewards.mean()), int((~value[..., 0].isnan()).sum())
            print(f"batch {number}: {right:.3f} right, {made} choices, {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
