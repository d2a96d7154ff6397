"""CPU seconds of sampling rollouts of several turns, beside one turn of as many tokens and beside reading them again.

    OMP_NUM_THREADS=1 python benchmarks/turns_cost.py --policy arithmetic words --turns 4 --tokens 64
    OMP_NUM_THREADS=1 python benchmarks/turns_cost.py --policy search --played
    OMP_NUM_THREADS=1 python benchmarks/turns_cost.py --policy charts --pictures

Each row samples `--tokens` tokens in all, in turns of equal limits; tools take no time, and put in `--observed` random
tokens after each turn but the last. With `--played` limits and observations are those of rollouts of the world of
search. No token ends a turn. One turn gets the same tokens in two ways: it samples those of the tools as well, or reads
them as a part of its prompts. The sides take turns; prints medians over rounds after the first. With `--step` each side
also takes an optimiser step on what it has sampled.

`--pictures` compares training steps of one turn: prompts with a new picture each, the tower frozen or trained, beside
texts of as many tokens for the policy's decoder alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM

from grail_lightning import (
    ArithmeticTask,
    ChartsData,
    HFEngine,
    Loading,
    Policy,
    SampledBatch,
    Sampling,
    SearchData,
    build_batch,
)
from grail_lightning.core.engines.base import TurnRequest, resend_turns
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.micro_batch import cut_rows
from grail_lightning.core.policy.source import LoadedPolicy
from grail_lightning.core.records.task import TokenText
from grail_lightning.core.step.episodes import play
from grail_lightning.worlds.search.task import SearchSpace
from grail_lightning.worlds.sums.task import ProblemSpace

GROUP = 8


class Update:
    """Optimiser steps that leave the weights as they are, each on the sampled tokens of a batch."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.optimizer = policy, torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0)

    def __call__(self, batch: SampledBatch) -> None:
        for micro in cut_rows(self.policy, batch, torch.arange(len(batch)), 4096):
            layout = self.policy.layout(batch.select(micro.rows), micro.starts)
            (-self.policy(layout).sum() / len(batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Case:
    """Prompts of the arithmetic world, and what tools will answer to each row."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.policy = load_policy(name).eval()
        self.policy.end_token_ids = ()
        self.engine = HFEngine()
        self.engine.update_weights(self.policy)
        self.update = Update(self.policy) if options.step else None
        task, draw = ArithmeticTask(), random.Random(0)
        problems = ProblemSpace().draw(options.prompts, "train", 0)
        self.prompts = [task.prompt({"problem": p.expression}) for p in problems for _ in range(GROUP)]
        self.ids = [self.policy.encode(prompt.messages) for prompt in self.prompts]
        self.limits = [[options.tokens // options.turns] * options.turns for _ in self.ids]
        self.sizes = [[options.observed] * (options.turns - 1) for _ in self.ids]
        if options.played:
            self._play(options)
        self.observed = [[draw.choices(range(10, 200), k=size) for size in row] for row in self.sizes]

    def _play(self, options: argparse.Namespace) -> None:
        """Take prompts, limits and sizes from rollouts with their environment."""
        data = SearchData(problems=SearchSpace(min_hops=2, max_hops=3), num_test=options.prompts, seed=0)
        policy, sampling = load_policy("search").eval(), Sampling(max_response_length=64)
        self.engine.update_weights(policy)
        prompts = data.load("train")[0].prompts[: options.prompts]
        batch = play(self.engine, policy, prompts, GROUP, sampling, range(len(prompts) * GROUP))
        self.engine.update_weights(self.policy)
        self.prompts = [prompt for prompt in prompts for _ in range(GROUP)]
        whole = zip(batch.input_ids.tolist(), batch.prompt_lengths.tolist(), strict=True)
        self.ids = [ids[batch.prompt_width - length : batch.prompt_width] for ids, length in whole]
        for k, row in enumerate(batch.valid_mask):
            sampled, turns = batch.response_mask[k][row], batch.turn[k][row]
            numbers = range(int(turns.max()) + 1)
            self.limits[k] = [int((sampled & (turns == number)).sum()) for number in numbers]
            self.sizes[k] = [int((~sampled & (turns == number)).sum()) for number in numbers[:-1]]

    def turns(self, *, again: bool) -> int:
        """All turns, with keys and values kept or all tokens read again; returns the number of sampled tokens."""
        ids: list[list[int]] = [[] for _ in self.ids]
        sampled: list[list[bool]] = [[] for _ in self.ids]
        sampling = Sampling(max_response_length=max(map(sum, self.limits)))
        read_again = nullcontext(partial(resend_turns, self.engine, sampling))
        with read_again if again else self.engine.turns(sampling) as sampler:
            for turn in range(max(map(len, self.limits))):
                going = [k for k, limits in enumerate(self.limits) if turn < len(limits)]
                before = [self.ids[k] + ids[k] for k in going]
                requests = [
                    TurnRequest(k, self.prompts[k], whole, self.limits[k][turn], seed=k)
                    for k, whole in zip(going, before, strict=True)
                ]
                for k, found in zip(going, sampler(requests), strict=True):
                    answer = self.observed[k][turn] if turn < len(self.observed[k]) else []
                    ids[k] += found.ids + answer
                    sampled[k] += [True] * len(found.ids) + [False] * len(answer)
        return self._train(self.ids, ids, sampled)

    def one_turn(self, *, read: bool) -> int:
        """One turn with as many tokens, those of the tools in the prompts or sampled; returns the sampled tokens."""
        requests: list[TurnRequest] = []
        for k, (prompt, ids, limits) in enumerate(zip(self.prompts, self.ids, self.limits, strict=True)):
            answers = [token for answer in self.observed[k] for token in answer]
            limit = sum(limits) + (0 if read else len(answers))
            requests.append(TurnRequest(k, prompt, ids + (answers if read else []), limit, seed=k))
        with self.engine.turns(Sampling(max_response_length=max(request.limit for request in requests))) as sampler:
            found = [sampled.ids for sampled in sampler(requests)]
        return self._train([request.ids for request in requests], found, [[True] * len(ids) for ids in found])

    def _train(self, prompts: list[list[int]], ids: list[list[int]], sampled: list[list[bool]]) -> int:
        """An optimiser step on the rollouts if one is asked for; returns the number of sampled tokens."""
        if self.update is not None:
            rows = [
                replace(prompt, messages=TokenText("", begun))
                for prompt, begun in zip(self.prompts, prompts, strict=True)
            ]
            batch = build_batch(self.policy, rows, 1, ids, [True] * len(ids), sampled=sampled)
            self.update(batch.replace(group=batch.group // GROUP))
        return sum(map(sum, sampled))


class PictureSteps:
    """Training steps of a policy with pictures, or of its decoder alone on texts of as many tokens."""

    def __init__(self, name: str, options: argparse.Namespace, *, text: bool = False, trained: bool = False) -> None:
        self.policy = load_policy(name, Loading(train_vision=trained))
        (drawn,) = ChartsData(num_train=options.prompts * (options.rounds + 1), seed=1).load("train")
        self.prompts, self.number = list(drawn.prompts), options.prompts
        lengths = [len(self.policy.encode(prompt.messages)) for prompt in self.prompts]
        if text:
            of_text = self.policy.model.config.get_text_config()
            decoder = AutoModelForCausalLM.from_config(of_text)
            decoder.model.load_state_dict(self.policy.decoder.state_dict())
            self.policy = load_policy(LoadedPolicy(decoder, self.policy.tokenizer))
            draw = random.Random(0)
            texts = [TokenText("", draw.choices(range(10, of_text.vocab_size), k=size)) for size in lengths]
            self.prompts = [replace(prompt, messages=ids) for prompt, ids in zip(self.prompts, texts, strict=True)]
        self.policy.end_token_ids = ()
        self.engine, self.sampling = HFEngine(), Sampling(max_response_length=options.tokens, temperature=100.0)
        self.engine.update_weights(self.policy)
        self.update = Update(self.policy)

    def step(self) -> int:
        """A training step on prompts that were not seen before; returns its tokens."""
        prompts, self.prompts = self.prompts[: self.number], self.prompts[self.number :]
        batch = self.engine.generate(prompts, GROUP, self.sampling, seed=len(self.prompts))
        self.update(batch)
        return int(batch.attention_mask.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=["arithmetic"])
    for name, value in (("turns", 4), ("tokens", 64), ("observed", 12), ("prompts", 16), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--played", action="store_true")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in options.policy:
        if options.pictures:
            first, kind = "pictures, frozen tower", "tokens"
            sides = {
                first: PictureSteps(name, options).step,
                "pictures, trained tower": PictureSteps(name, options, trained=True).step,
                "texts of as many tokens": PictureSteps(name, options, text=True).step,
            }
        else:
            first, kind, case = "turns", "sampled tokens", Case(name, options)
            sides = {
                first: partial(case.turns, again=False),
                "turns, all tokens read again": partial(case.turns, again=True),
                "one turn, tools' tokens sampled": partial(case.one_turn, read=False),
                "one turn, tools' tokens read": partial(case.one_turn, read=True),
            }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(options.rounds + 1):
            for side in sorted(sides, reverse=bool(number % 2)):
                begin = time.process_time()
                tokens = sides[side]()
                if number:
                    seconds[side].append(time.process_time() - begin)
                else:
                    print(f"{name}: {side}: {tokens} {kind}")
        for side, own in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(seconds[first], own, strict=True))
            print(f"{name}: {side}: {statistics.median(own):.3f} s; {first} take {ratio:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
