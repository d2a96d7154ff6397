"""Values of states by resampling, at every token that was a choice: the truth that credit methods are measured against.

    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE                     # sums of five terms, 35 minutes
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --world words       # 26 minutes
    OMP_NUM_THREADS=1 python benchmarks/credit_values.py FILE --terms 10          # 7 hours

The rollouts are those of benchmarks/credit_gradients.py with the same options, which reads FILE. A token is a choice if
the policy gave it a probability below 1 - 1e-3; a token that is none moves the value by at most that. From the state
before each choice `SAMPLES` continuations are sampled and graded, in two independent halves. FILE is written after
every batch, and a second call goes on where the first one ended.

Shapes: ``N`` batches, ``B`` rows, ``T`` response tokens; 2 halves.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from credit_quality import graded_responses
from credit_subjects import Setting, setting
from torch import Tensor

from grail_lightning.answers import Verifier
from grail_lightning.batch import GradedBatch
from grail_lightning.credit.base import CreditContext
from grail_lightning.credit.measure import measure_logits
from grail_lightning.credit.tree import prefix_path
from grail_lightning.engines import HFEngine
from grail_lightning.engines.base import build_batch
from grail_lightning.functional.certainty import repeat_probability
from grail_lightning.grading import grade_and_locate, grade_answers
from grail_lightning.policy import Policy, load_policy
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.tasks.base import TokenText

PROMPTS = 16  # A batch of the quickstart.
SAMPLES = 64
CERTAIN = 1e-3
TOKEN_BUDGET = 1024


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
    policy: Policy, engine: HFEngine, verifier: Verifier, where_from: Setting, batch: GradedBatch, seed: int
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
            asked, SAMPLES, replace(where_from.sampling, max_response_length=limit), derive_seed(seed, length)
        )
        assert drawn.sampling_logprobs is not None
        whole = [
            policy.tokenizer.decode([*batch.response_ids[row, :column].tolist(), *ids], skip_special_tokens=True)
            for k, (row, column) in enumerate(some)
            for ids in (
                drawn.response_ids[k * SAMPLES + j][drawn.response_mask[k * SAMPLES + j]].tolist()
                for j in range(SAMPLES)
            )
        ]
        verdicts = grade_answers(whole, [batch.prompts[row] for row, _ in some for _ in range(SAMPLES)], verifier)
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


def kept_rollouts(
    values: dict[str, np.ndarray], where_from: Setting, policy: Policy, verifier: Verifier, number: int
) -> list[GradedBatch]:
    """The rollouts that a file holds, graded again: another processor would sample others."""
    (problems,) = where_from.data.load("train")
    pad, end = policy.tokenizer.pad_token_id, policy.tokenizer.eos_token_id
    rollouts = []
    for k, rows in enumerate(values["ids"][:number].tolist()):
        prompts = problems.prompts[k * PROMPTS : (k + 1) * PROMPTS]
        responses = [[token for token in row if token != pad] for row in rows]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--world", choices=["chains", "words"], default="chains")
    parser.add_argument("--terms", type=int, default=5, help="of chains")
    parser.add_argument("--batches", type=int, default=64, help=f"of {PROMPTS} problems")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    where_from = setting(options.world, options.terms, options.batches * PROMPTS, options.seed)
    policy = load_policy(where_from.policy).eval()
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)
    arrays = read_values(options.file) if options.file.exists() else {}
    done = len(arrays["rewards"]) if arrays else 0
    width = where_from.sampling.max_response_length
    with Verifier() as verifier, torch.no_grad():
        rollouts = batches(policy, engine, verifier, where_from, options.batches, options.seed)
        for number, batch in enumerate(rollouts):
            if number < done:
                continue
            begun = time.perf_counter()
            seed = derive_seed(options.seed, "values", number)
            value, best = resampled_values(policy, engine, verifier, where_from, batch, seed)
            missing = width - batch.response_ids.shape[1]
            fresh = {
                "ids": torch.nn.functional.pad(batch.response_ids, (0, missing)).short(),
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
