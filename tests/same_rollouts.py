"""Three steps of plain SGD on rollouts that depend on the prompt alone: the number of processes must not matter.

A case is a credit method, such as GRAIL, OARGradient, PRIME or Uniform, and options after hyphens. "half"
holds the policy in bfloat16, beside float32 masters, which are reported; "once" reduces the gradients of sharded
weights with the last micro-batch of a step; "apart" runs every row whole; "own" gives saliency a forward pass of its
own; "recomputed" checkpoints the blocks; "compiled" compiles them; "cut" takes two optimiser steps a batch, so that the
saliency of half of the rows is computed before them; "split" deals single rows over them.
"""

import os
from unittest.mock import patch

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import grail_lightning.credit
from grail_lightning import EnergyBaseline, Loading, RolloutEngine, build_batch
from grail_lightning.core.runtime.collectives import whole_tensor
from grail_lightning.credit import SaliencyOptions
from tests.runs import Watch, module, problems, strategy_of, trained_model, trainer

PROMPTS, STEPS = 4, 3


class ByPrompt(RolloutEngine):
    """Writes responses instead of sampling them: filler of uneven length, then the right or a wrong answer.

    Of the prompts of a step, two ranks get those at even and at odd places. In step 1 the odd ones are dead groups: a
    rank without a live row. In step 2 their responses have no box: a rank without an eligible row.
    """

    def __init__(self, prompts):
        self.places = {str(prompt.messages): k for k, prompt in enumerate(prompts)}
        self.policy = None

    def update_weights(self, policy):
        self.policy = policy

    def generate(self, prompts, group_size, sampling, seed):
        ids = [
            self.policy.tokenizer(self.text(prompt, place), add_special_tokens=False)["input_ids"]
            + [self.policy.tokenizer.eos_token_id]
            for prompt in prompts
            for place in range(group_size)
        ]
        return build_batch(self.policy, prompts, group_size, ids, [True] * len(ids))

    def text(self, prompt, place):
        number = self.places[str(prompt.messages)]
        step, odd = number // PROMPTS, number % 2
        right = place % 2 == 0 and not (step == 1 and odd)
        value = prompt.reference if right else str(int(prompt.reference) + place + 1)
        lines = "".join(f"{place}+{k}={place + k}\n" for k in range((3 * number + place) % 7))
        # Without a box an answer is missing, and so wrong; the right ones of a group keep theirs.
        return lines + (value if step == 2 and odd and not right else f"\\boxed{{{value}}}")


def figures(weights):
    """Some entries of each weight."""
    return [whole_tensor(p).double().flatten()[::997].tolist() for p in weights]


def run_case(strategy, credit, *extra):
    """A fit's report."""
    prompts = problems(PROMPTS * STEPS, seed=3)
    own = {"saliency": SaliencyOptions(fuse=False)} if "own" in extra else {}
    if credit == "PRIME":
        own = {"double_forward": True, "optimizer": lambda p: torch.optim.SGD(p, lr=0.05)}
    ours = module(
        {
            "token_budget": 150,
            "kl_coefficient": 0.0,
            "share_prefixes": "apart" not in extra,
            "mini_batches": 2 if "cut" in extra else 1,
            "split_groups": "split" in extra,
        },
        advantage=EnergyBaseline() if "energy" in extra else None,
        credit=getattr(grail_lightning.credit, credit)(**own),
        control=grail_lightning.credit.Balanced() if "energy" in extra else None,
        engine=ByPrompt(prompts),
        # Several chunks a micro-batch, so that the written-out backward pass runs.
        loading=Loading(
            chunk_tokens=16,
            reduce_once="once" in extra,
            gradient_checkpointing="recomputed" in extra,
            compile="aot_eager" if "compiled" in extra else False,
        ),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
    )
    ranks = 1 if strategy == "one" else 2
    mine = prompts[int(os.environ.get("LOCAL_RANK", "0")) :: ranks]
    loader = torch.utils.data.DataLoader(mine, batch_size=PROMPTS // ranks, collate_fn=list)
    chosen = "auto" if strategy == "one" else strategy_of(strategy)
    # `ModelParallelStrategy` refuses float64.
    precision = "bf16-true" if "half" in extra else "32-true" if strategy == "fsdp2" else "64-true"
    watch, embedded = Watch(), []

    def count(layer, args, output):
        embedded.append(args[0].numel() if torch.is_grad_enabled() else 0)

    synchronised = []

    def average(state, bucket):
        synchronised.append(bucket.is_last())
        return allreduce_hook(state, bucket)

    def begin(run, module):
        module.policy.model.get_input_embeddings().register_forward_hook(count)
        if strategy == "ddp":
            run.strategy.model.register_comm_hook(None, average)

    watch.on_train_start = begin
    steps = STEPS * (2 if "cut" in extra else 1)
    run = trainer(steps, watch, devices=ranks, strategy=chosen, use_distributed_sampler=False, precision=precision)
    # FSDP2's own collectives, by name: to count among all operators would take half of the test's time.
    dist = torch.distributed
    with (
        patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduce,
        patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather,
    ):
        run.fit(ours, loader)
    return {
        "rank": run.global_rank,
        "reductions": reduce.call_count,
        "gatherings": gather.call_count,
        "compiled": ours.policy.compiled_blocks is not None,
        "embedded": sum(embedded),
        "micro_batches": sum(number > 0 for number in embedded),
        "synchronised": sum(synchronised),
        "weights": figures(ours.gradients.weights),
        "second": figures(second.policy.parameters()) if (second := trained_model(ours)) else [],
        "loss": [output.metrics["loss"] for output in watch.outputs],
        "live": [int((output.batch.advantages != 0).sum()) for output in watch.outputs],
        "eligible": [output.metrics.get("credit/eligible") for output in watch.outputs],
    }


def run_cases(strategy, *cases):
    """The report of each case, of this rank."""
    return [run_case(strategy, *case.split("-")) for case in cases]
