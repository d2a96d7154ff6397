"""What token credit costs: step time of GRAIL over GRPO, alternating in one run.

    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py --case quickstart
    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py --case 30m

`quickstart` samples from the packaged policy as the quickstart does. `30m` is a random-weight Qwen3 of about 30 million
parameters on seeded stand-in rollouts of 256-512 tokens, the same on both sides: every group mixed, half of the rows
boxed with a negative advantage. Each round measures sampling, the passes of one update, GRAIL's credit as it is, and
GRAIL as published code does it (all rows, whole sequences, logits of all positions, parameter gradients, every update).
Prints medians and the ratios of a step with 1 and with 4 updates, with and without sampling.
"""

import argparse
import statistics
import time
from collections import defaultdict
from functools import partial

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from grail_lightning.credit import GRAIL, CreditContext
from grail_lightning.data import ArithmeticData
from grail_lightning.engines import HFEngine
from grail_lightning.functional import group_advantages
from grail_lightning.locate import align_rows, answer_masks
from grail_lightning.objective import Objective
from grail_lightning.policy import Policy, load_policy
from grail_lightning.rollout import AnswerMasks, RolloutBatch, Sampling, lengths_to_mask
from grail_lightning.update import Update


def quickstart_rollouts(policy: Policy, round_number: int) -> tuple[RolloutBatch, Sampling]:
    """128 responses sampled as the quickstart samples them."""
    sampling = Sampling(max_response_length=64)
    engine = HFEngine()
    engine.update_weights(policy)
    (problems,) = ArithmeticData(num_train=512).load("train")
    prompts = [problems.prompts[16 * round_number + k] for k in range(16)]
    batch = engine.generate(prompts, 8, sampling, seed=round_number)
    right = [p.task.answer(t) == p.reference for t, p in zip(batch.texts, batch.prompts, strict=True)]
    answer = answer_masks(batch, align_rows(batch, policy.tokenizer))
    advantages = group_advantages(torch.tensor(right).float(), 8)
    return batch.replace(advantages=advantages, answer=answer), sampling


def big_policy() -> Policy:
    """About 30 million random weights behind the packaged tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Policy(AutoModelForCausalLM.from_config(config), load_policy("arithmetic").tokenizer)


def stand_in_rollouts(policy: Policy, round_number: int, rows: int = 8) -> tuple[RolloutBatch, Sampling]:
    """Seeded responses of uneven length that end on an 8-token box; half of each group of 4 is right."""
    random = torch.Generator().manual_seed(round_number)
    lengths = torch.randint(256, 513, (rows,), generator=random)
    width, prompt = int(lengths.max()), 64
    ids = torch.randint(3, 8192, (rows, prompt + width), generator=random)
    mask = lengths_to_mask(lengths, width)
    whole = mask & ~lengths_to_mask(lengths - 8, width)
    inner = lengths_to_mask(lengths - 1, width) & ~lengths_to_mask(lengths - 5, width)
    answer = AnswerMasks(whole=whole, content=inner, marker=whole & ~inner, after=torch.zeros_like(mask))
    advantages = torch.tensor([0.5, -0.5]).repeat(rows // 2)
    batch = RolloutBatch(
        input_ids=ids,
        attention_mask=torch.cat([torch.ones(rows, prompt, dtype=torch.bool), mask], 1),
        response_ids=ids[:, prompt:],
        response_mask=mask,
        group=torch.arange(rows) // 4,
        row=torch.arange(rows),
        finished=torch.ones(rows, dtype=torch.bool),
        prompts=[None] * rows,
        texts=[""] * rows,
        answer=answer,
        advantages=advantages,
    )
    return batch, Sampling(max_response_length=512)


def one_update(policy: Policy, batch: RolloutBatch, sampling: Sampling) -> None:
    """The forward and backward passes of one optimiser step."""
    update = Update(policy, None, batch, Objective(group_size=4, token_budget=16384), sampling, seed=0)
    for rows in update.plan(batch.response_mask.float(), None):
        update.accumulate(rows, torch.Tensor.backward)
    policy.zero_grad(set_to_none=True)


def published_saliency(policy: Policy, batch: RolloutBatch) -> None:
    """All rows, all positions, all logits, and gradients of the parameters as well."""
    embeds = policy.embed(batch.input_ids)
    embeds.retain_grad()
    logits = policy.model(inputs_embeds=embeds, attention_mask=batch.attention_mask.long(), use_cache=False).logits
    width = batch.response_mask.shape[1]
    logprobs = logits[:, -width - 1 : -1].float().log_softmax(-1).gather(-1, batch.response_ids[..., None]).squeeze(-1)
    (-(logprobs * batch.answer.whole).sum()).backward()
    policy.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["quickstart", "30m"], default="quickstart")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy("arithmetic") if options.case == "quickstart" else big_policy()
    policy.train()
    make = quickstart_rollouts if options.case == "quickstart" else stand_in_rollouts
    print(f"{sum(p.numel() for p in policy.parameters()) / 1e6:.1f} M parameters, {options.rounds} rounds")
    seconds, eligible = defaultdict(list), []
    context = CreditContext(step=0, generator=torch.Generator().manual_seed(0), token_budget=16384)
    for number in range(options.rounds + 1):
        laps, start = {}, time.perf_counter()
        batch, sampling = make(policy, number)
        laps["sample"] = time.perf_counter() - start
        for name, work in (
            ("update", partial(one_update, policy, batch, sampling)),
            ("credit", partial(GRAIL(), policy, batch, context)),
            ("published", partial(published_saliency, policy, batch)),
        ):
            start = time.perf_counter()
            result = work()
            laps[name] = time.perf_counter() - start
            if name == "credit":
                eligible.append(result.metrics["eligible"])
        if number:  # The first round warms up.
            for name, lap in laps.items():
                seconds[name].append(lap)
    median = {name: statistics.median(laps) for name, laps in seconds.items()}
    if options.case != "quickstart":
        median["sample"] = 0.0
    print("seconds: " + ", ".join(f"{name} {value:.3f}" for name, value in median.items()))
    print(f"eligible rows {statistics.mean(eligible):.2f}, credit / update {median['credit'] / median['update']:.2f}")
    print("| updates | GRAIL / GRPO | without sampling | published way / GRPO | without sampling |")
    print("|--:|--:|--:|--:|--:|")
    for updates in (1, 4):
        base, sample = updates * median["update"], median["sample"]
        ours, theirs = median["credit"], updates * median["published"]
        whole = [(sample + base + extra) / (sample + base) for extra in (ours, theirs)]
        bare = [(base + extra) / base for extra in (ours, theirs)]
        print(f"| {updates} | {whole[0]:.2f} | {bare[0]:.2f} | {whole[1]:.2f} | {bare[1]:.2f} |")


if __name__ == "__main__":
    main()
