"""Make a file of the benchmark: rollouts of a world, their labels, and values of their states by resampling.

    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py sums                           # 35 minutes
    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py words                          # 26 minutes
    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py long_sums                      # 7 hours
    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py search                         # half a minute a batch
    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py charts                         # the same
    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py code --batches 64 --samples 32
    OMP_NUM_THREADS=1 python scripts/make_benchmark_data.py sums --products                # 2 minutes

The rollouts are samples of the packaged policy on training problems of its world. A token is a choice if the policy
gave it a probability below 1 - 1e-3; a token that is none moves the value by at most that. From the state before each
choice `--samples` continuations are sampled and graded, in two independent halves. In a world of several turns, values
are those of the states before each turn: the environment answers to the turns before once more. The file is written
after every batch, and a second call goes on where the first one ended. `grail_lightning/app/benchmark/stored.py` lists
what it holds. Another processor samples other rollouts. With `--products` the rollouts stay as they are, and the
products of the gradients of uniform credit, lower baselines and resampled values are computed (`compared`).

Shapes: ``N`` batches, ``B`` rows, ``T`` response tokens; 2 halves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from grail_lightning import GradedBatch, HFEngine, Policy, Prompt, SampledBatch, Sampling, grade_answers
from grail_lightning.answers import Verifier
from grail_lightning.app.benchmark.compared import NUMBER, compute_references, file_of, write_references
from grail_lightning.app.benchmark.replay import Turns, without_pictures
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, PROMPTS, open_world, told_verdict
from grail_lightning.app.benchmark.stored import read_arrays
from grail_lightning.app.benchmark.worlds import WORLDS, World
from grail_lightning.core.credit.base import CreditContext
from grail_lightning.core.credit.measure import gradient_energies, measure_logits
from grail_lightning.core.credit.tree import prefix_path
from grail_lightning.core.credit.turns import turn_scores, turn_table
from grail_lightning.core.engines.base import SampledTurn, TurnRequest, TurnSampler, decode
from grail_lightning.core.engines.hf.engine import ContinuedTurns
from grail_lightning.core.functional.advantages import sum_by_turn, turn_numbers, turn_starts
from grail_lightning.core.functional.certainty import repeat_probability
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.records.episode import EndReason
from grail_lightning.core.records.task import StepKind, TokenText
from grail_lightning.core.rollout.grading import align_rows, grade_and_locate, labelled_steps
from grail_lightning.core.runtime.files import whole_file
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.episodes import play

SAMPLES = 64
TURN_SAMPLES = 32  # The same of a turn.
CERTAIN = 1e-3
TOKEN_BUDGET = 1024
WIDTH = 320  # Columns of a file with rollouts of several turns.
MOST_TURNS, MOST_STEPS = 16, 32
ROLLOUTS_PER_CALL = 2048


# --- rollouts and their continuations ---


class GivenTurns:
    """Gives each row its first turns, and samples those behind them.

    The environments answer to given turns as to sampled ones: if they are deterministic, a rollout goes on from the
    beginning of any turn, or is played again as a whole.
    """

    def __init__(self, sampler: ContinuedTurns, given: Sequence[Turns]) -> None:
        self.sampler, self.given = sampler, [[*turns] for turns in given]

    def __call__(self, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
        """See `TurnSampler`."""
        known = {
            request.row: (self.given[request.row].pop(0), request) for request in requests if self.given[request.row]
        }
        asked = [request for request in requests if request.row not in known]
        turns = dict(zip((request.row for request in asked), self.sampler(asked), strict=True))
        for row, (ids, request) in known.items():
            ended = self.sampler.ending(request.stop)(torch.tensor([ids]))
            turns[row] = SampledTurn([*ids], [0.0] * len(ids), bool(ended))
        return [turns[request.row] for request in requests]


class GivenEngine(HFEngine):
    """An engine whose rollouts begin with given turns."""

    def __init__(self, given: Sequence[Turns]) -> None:
        super().__init__(cache_tokens=200_000)
        self.given = given

    @contextmanager
    def turns(self, sampling: Sampling) -> Iterator[TurnSampler]:
        """See `RolloutEngine.turns`."""
        with super().turns(sampling) as sampler:
            yield GivenTurns(sampler, self.given)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Samples, continues and grades rollouts of a world."""

    world: World
    policy: Policy
    engine: HFEngine  # It has the weights of the policy.
    verifier: Verifier

    def play_from(self, prompts: Sequence[Prompt], given: Sequence[Turns], seed: int) -> SampledBatch:
        """Rollouts in groups of one size, each of which begins with given turns."""
        engine = GivenEngine(given)
        engine.update_weights(self.policy)
        seeds = [derive_seed(seed, k) for k in range(len(given))]
        return play(engine, self.policy, prompts, len(given) // len(prompts), self.world.sampling, seeds)

    def rollouts(self, prompts: Sequence[Prompt], seed: int) -> GradedBatch:
        """A group of graded rollouts of each problem."""
        key, size = derive_seed(seed, "rollouts"), GROUP_SIZE
        if self.world.turns:
            batch = self.play_from(prompts, [()] * len(prompts) * size, key)
        else:
            batch = self.engine.generate(list(prompts), size, self.world.sampling, key)
        return grade_and_locate(batch, self.verifier, self.policy.tokenizer)

    def batches(self, start: int, number: int, seed: int) -> Iterator[GradedBatch]:
        """Graded rollouts of different training problems, from the batch `start` on."""
        (problems,) = self.world.data(number * PROMPTS).load("train")
        for k in range(start, number):
            yield self.rollouts(problems.prompts[k * PROMPTS : (k + 1) * PROMPTS], derive_seed(seed, "batch", k))

    def right(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> Tensor:
        """``[B]`` float: whether each text answers its prompt."""
        return torch.tensor([verdict.correct for verdict in grade_answers(texts, prompts, self.verifier)]).float()

    def continue_turns(
        self, places: Sequence[tuple[Prompt, Turns]], number: int, seed: int
    ) -> Iterator[tuple[SampledBatch, Tensor]]:
        """`number` rollouts from each place, the places in several calls: rollouts, and ``[P, number]`` if right."""
        size = max(1, ROLLOUTS_PER_CALL // number)
        for k in range(0, len(places), size):
            prompts, begun = zip(*places[k : k + size], strict=True)
            batch = self.play_from(prompts, [turns for turns in begun for _ in range(number)], derive_seed(seed, k))
            yield batch, self.right(batch.texts, batch.prompts).reshape(len(prompts), number)

    def continue_tokens(
        self, places: Sequence[tuple[Prompt, Sequence[int]]], number: int, seed: int
    ) -> tuple[SampledBatch, Tensor]:
        """`number` continuations from each place, whose ids are equally many, and ``[P, number]`` if right."""
        asked = []
        for prompt, begun in places:
            # A beginning keeps its sampled tokens: another tokenisation would be another context.
            context = TokenText(self.policy.tokenizer.decode(begun), [*self.policy.encode(prompt.messages), *begun])
            asked.append(replace(prompt, messages=context))
        whole = self.world.sampling.max_response_length
        limit = replace(self.world.sampling, max_response_length=whole - len(places[0][1]))
        drawn = self.engine.generate(asked, number, limit, seed)
        owners = [place for place in places for _ in range(number)]
        rows = zip(owners, drawn.response_ids, drawn.response_mask, strict=True)
        texts = [decode(self.policy, [*begun, *ids[mask].tolist()]) for (_, begun), ids, mask in rows]
        return drawn, self.right(texts, [prompt for prompt, _ in owners]).reshape(len(places), number)


@contextmanager
def open_lab(world: World) -> Iterator[Lab]:
    """The policy of a world with an engine and a verifier."""
    policy, engine = load_policy(world.policy).eval(), HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    with Verifier() as verifier:
        yield Lab(world=world, policy=policy, engine=engine, verifier=verifier)


def turns_before(batch: SampledBatch, row: int, stop: int) -> Turns:
    """The ids that were sampled in a row in front of a column, turn by turn."""
    ids, numbers = batch.response_ids[row, :stop], turn_numbers(batch.response_mask, batch.turn)[row, :stop]
    return tuple(tuple(ids[numbers == k].tolist()) for k in range(int(numbers.max()) + 1 if stop else 0))


# --- values ---


def choices(policy: Policy, batch: GradedBatch) -> tuple[Tensor, Tensor]:
    """``[B, T]`` each: tokens that were a choice, and the probability that two draws at their place are equal."""
    context = CreditContext(step=0, generator=torch.Generator(), token_budget=TOKEN_BUDGET)
    own, repeated = measure_logits(policy, batch, context, torch.arange(len(batch)), repeat_probability)
    return batch.response_mask & (own < 1 - CERTAIN), repeated


def value_and_baseline(right: Tensor, weight: Tensor) -> Tensor:
    r"""``[P, K] -> [P, 2, 2]``: ``V`` and ``b*`` of states, in two halves, from `right` continuations and their ``W``.

    .. math:: V(s) = E_a[Q(s, a)], \qquad b^*(s) = E_a[W(s, a) Q(s, a)] / E_a[W(s, a)]

    ``W`` is the squared norm of the gradient of the next log-probability with respect to its logits.
    """
    halves, weight = (x.reshape(len(right), 2, -1) for x in (right, weight.clamp(min=1e-8)))
    return torch.stack([halves.mean(-1), (weight * halves).sum(-1) / weight.sum(-1)], 1)


def values_of_tokens(lab: Lab, batch: GradedBatch, seed: int, samples: int) -> Tensor:
    r"""``[2, B, T, 2]``: `value_and_baseline` of the state before each choice; NaN elsewhere.

    .. math:: W(s, a) = 1 - 2 \pi(a) + \sum_v \pi(v)^2
    """
    chosen, repeated = choices(lab.policy, batch)
    states = prefix_path(batch)[:, :-1]  # Before each token.
    owner = {int(states[row, column]): (row, column) for row, column in reversed(chosen.nonzero().tolist())}
    values = torch.full((2, *states.shape, 2), torch.nan)
    by_length = groupby(sorted(owner.items(), key=lambda item: (item[1][1], item[1][0])), key=lambda item: item[1][1])
    for column, group in by_length:
        keys, rows = zip(*((state, row) for state, (row, _) in group), strict=True)
        places = [(batch.prompts[row], batch.response_ids[row, :column].tolist()) for row in rows]
        drawn, right = lab.continue_tokens(places, samples, derive_seed(seed, column))
        assert drawn.sampling_logprobs is not None
        first = drawn.sampling_logprobs[:, 0].exp().reshape(right.shape)
        figures = value_and_baseline(right, 1 - 2 * first + repeated[list(rows), column][:, None])
        for state, own in zip(keys, figures, strict=True):
            values[:, chosen & (states == state)] = own[:, None]
    return values


def values_of_turns(lab: Lab, batch: GradedBatch, seed: int) -> Tensor:
    """The same at the first token of each turn, whose ``W`` is the sum over its tokens."""
    turns, states = turn_table(batch), prefix_path(batch)[:, :-1]
    starts = turn_starts(turns.numbers, turns.exists.shape[1])
    borders = [(row, k, int(starts[row, k])) for row, k in turns.exists.nonzero().tolist()]
    owner = {int(states[row, column]): (row, k, column) for row, k, column in reversed(borders)}
    places = [(batch.prompts[row], turns_before(batch, row, column)) for row, _, column in owner.values()]
    context = CreditContext(step=0, generator=torch.Generator(), token_budget=TOKEN_BUDGET)
    numbers = iter([k for _, k, _ in owner.values()])
    figures = []
    for drawn, right in lab.continue_turns(places, TURN_SAMPLES, seed):
        own = turn_table(drawn)
        first = torch.tensor([next(numbers) for _ in right]).repeat_interleave(TURN_SAMPLES)[:, None]
        # Many continuations begin with the same turn: one of them stands for all.
        stops = turn_starts(own.numbers, own.exists.shape[1] + 1).gather(1, first + 1).flatten().tolist()
        same: dict[object, int] = {}
        begun = [(row // TURN_SAMPLES, turns_before(drawn, row, int(stop))) for row, stop in enumerate(stops)]
        alike = torch.tensor([same.setdefault(turns, row) for row, turns in enumerate(begun)])
        energy = gradient_energies(lab.policy, drawn, context, torch.tensor([*same.values()]))
        weight = sum_by_turn(energy, own.numbers, own.exists.shape[1]).gather(1, first)[alike, 0]
        figures.append(value_and_baseline(right, weight))
    by_state = dict(zip(owner, torch.cat(figures), strict=True))
    values = torch.full((2, *states.shape, 2), torch.nan)
    for row, _, column in borders:
        values[:, row, column] = by_state[int(states[row, column])].to(values)
    return values


# --- files ---


def labels_of(lab: Lab, batch: GradedBatch) -> dict[str, np.ndarray]:
    """The arrays of labels: of turns their scores, else the labelled steps."""
    if batch.turn is not None:
        scores = turn_scores(batch, turn_table(batch).exists)
        return {"score": pad(scores, (0, MOST_TURNS - scores.shape[1]), value=torch.nan).half().numpy()[None]}
    steps = np.zeros((len(batch), MOST_STEPS, 7), dtype=np.int16)
    numbers = np.full(len(batch), -1, dtype=np.int8)
    kinds = get_args(StepKind)
    for row, (aligned, prompt) in enumerate(zip(align_rows(batch, lab.policy.tokenizer), batch.prompts, strict=True)):
        if (labelled := labelled_steps(aligned.text, prompt)) is None:
            continue
        numbers[row] = len(labelled)
        for k, step in enumerate(labelled):
            tokens = aligned.overlapping(*(step.result or (step.start, step.stop)))
            places = (tokens[0], tokens[-1] + 1) if tokens else (0, 0)
            steps[row, k] = step.start, step.stop, kinds.index(step.kind), *(step.result or (-1, -1)), *places
    return {"steps": steps[None], "num_steps": numbers[None]}


def arrays_of(lab: Lab, batch: GradedBatch, values: Tensor | None) -> dict[str, np.ndarray]:
    """What a file holds of a batch but its verdicts, padded to the width that all batches have."""
    missing = (WIDTH if lab.world.turns else lab.world.length) - batch.response_ids.shape[1]
    assert missing >= 0
    arrays = {"ids": pad(without_pictures(lab.policy, batch.response_ids), (0, missing)).short()}
    if batch.episodes is not None:
        arrays["turn"] = pad(turn_numbers(batch.response_mask, batch.turn), (0, missing), value=-1).char()
        ends = get_args(EndReason)
        arrays["end"] = torch.tensor([ends.index(episode.end) for episode in batch.episodes]).char()
    arrays["rewards"] = batch.rewards.half()
    if values is not None:
        arrays["value"], arrays["best"] = pad(values, (0, 0, 0, missing), value=torch.nan).half()
    return {name: array.numpy()[None] for name, array in arrays.items()} | labels_of(lab, batch)


def add(arrays: dict[str, np.ndarray], fresh: dict[str, np.ndarray], batch: GradedBatch) -> dict[str, np.ndarray]:
    """The arrays of a file with those of one more batch."""
    texts = arrays.get("verdicts", np.array([], dtype=str)).tolist()
    told = [told_verdict(verdict) for verdict in batch.verdicts]
    texts += dict.fromkeys(text for text in told if text not in texts)
    place = {text: k for k, text in enumerate(texts)}
    fresh = fresh | {"verdict": np.array([[place[text] for text in told]], dtype=np.int16)}
    joined = {name: np.concatenate([arrays[name], more]) if name in arrays else more for name, more in fresh.items()}
    return arrays | joined | {"verdicts": np.array(texts)}


def write(file: Path, arrays: dict[str, Any]) -> None:
    """Write a file as a whole."""
    with whole_file(file) as unfinished, unfinished.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


ALL = ("ids", "turn", "end", "rewards", "verdict", "verdicts", "steps", "num_steps", "score", "value", "best")


def main() -> None:
    """Make the file, or go on with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--file", type=Path, help="default that of the package")
    parser.add_argument("--batches", type=int, default=64, help=f"of {PROMPTS} problems")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each state, an even number; not of turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--products", action="store_true", help="of the steps with which methods are compared, alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = WORLDS[options.world]
    if options.products:
        with open_world(world.name, NUMBER) as opened:
            write_references(compute_references(opened), options.file or file_of(world))
        return
    file = options.file or world.file
    arrays = read_arrays(file, ALL) if file.exists() else {}
    with open_lab(world) as lab, torch.no_grad():
        start = len(arrays.get("rewards", ()))
        for number, batch in enumerate(lab.batches(start, options.batches, options.seed), start):
            begun, seed = time.perf_counter(), derive_seed(options.seed, "values", number)
            values = (
                values_of_turns(lab, batch, seed)
                if world.turns
                else values_of_tokens(lab, batch, seed, options.samples)
            )
            arrays = add(arrays, arrays_of(lab, batch, values), batch)
            write(file, arrays)
            right, made = float(batch.rewards.mean()), int((~values[0, ..., 0].isnan()).sum())
            print(f"batch {number}: {right:.3f} right, {made} choices, {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
