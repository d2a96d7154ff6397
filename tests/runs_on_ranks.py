"""Short runs on CPU processes, of which each returns a report; `test_ranks` and `test_ahead` start them."""

import torch

import grail_lightning.credit
from grail_lightning import ArithmeticData, ExportPolicy, LastCheckpoint, Sampling
from grail_lightning.core.runtime.collectives import whole_tensor
from tests.copying_engine import Elsewhere
from tests.draws import without_ties
from tests.runs import Watch, batches, module, strategy_of, trained_model, trainer
from tests.steps import sums

CREDITS = {name: getattr(grail_lightning.credit, name) for name in ("GRAIL", "DGPO", "OARGradient")} | {
    "PRIME": lambda: grail_lightning.credit.PRIME(
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), double_forward=True
    )
}


def strategies(ranks, strategy, *credits):
    """Two batches with each credit method, and a validation."""
    reports = []
    for credit in credits:
        # A small budget gives the ranks different numbers of micro-batches; five problems, uneven shares.
        # Rows apart, so that replicated and sharded weights round alike.
        options = {"token_budget": 100, "kl_coefficient": 0.05, "share_prefixes": False}
        ours, watch = module(options, credit=CREDITS[credit]()), Watch()
        data = ArithmeticData(num_train=64, num_val=5, prompts_per_batch=4, eval_prompts_per_batch=4)
        run = trainer(2, watch, devices=ranks, strategy=strategy_of(strategy, ranks), num_sanity_val_steps=0)
        with without_ties():  # The texts of both strategies are compared.
            run.fit(ours, data)
        run.validate(ours, data, verbose=False)
        report = {
            "rank": run.global_rank,
            "weights": [whole_tensor(p).double().square().sum().item() for p in ours.policy.parameters()],
            "texts": watch.outputs[-1].batch.texts,
            "metrics": {k: v for k, v in watch.outputs[-1].metrics.items() if not k.startswith("time/")},
        }
        reports.append(report)
    return reports


def saved_fit(ours, data, ranks, strategy, max_steps, folder, begun, *callbacks, **changes):
    """A fit that leaves `last.ckpt` in a folder; it goes on from that of the folder `begun`, if there is one."""
    watch, saver = Watch(), LastCheckpoint(folder=str(folder), every_n_batches=1)
    changes = {"devices": ranks, "strategy": strategy_of(strategy, ranks), "enable_checkpointing": True} | changes
    run = trainer(max_steps, watch, saver, *callbacks, **changes)
    run.fit(ours, data, ckpt_path=begun and str(begun / "last.ckpt"), weights_only=begun and True)
    return run.global_rank, watch.outputs


def interrupted(ranks, folder, credit):
    """Four optimiser steps with sharded weights, two a batch, whole and interrupted after two."""

    def fit(max_steps, part, begun, *callbacks):
        options = {"num_iterations": 2, "token_budget": 100, "kl_coefficient": 0.05}
        ours = module(options, credit=CREDITS[credit]())
        where = folder / part, begun
        how = {"use_distributed_sampler": False}
        rank, outputs = saved_fit(ours, batches(1), ranks, "fsdp2", max_steps, *where, *callbacks, **how)
        return rank, {
            "weights": sums(ours.policy.parameters()),
            "second": sums(second.policy.parameters()) if (second := trained_model(ours)) else [],
            "texts": outputs[-1].batch.texts,
            "norms": outputs[-1].metrics["grad_norm"],
        }

    rank, whole = fit(4, "whole", None)
    fit(2, "begun", None)
    _, resumed = fit(4, "resumed", folder / "begun", ExportPolicy(folder=str(folder / "export")))
    return {"rank": rank} | {name: {"whole": whole[name], "resumed": resumed[name]} for name in whole}


def ahead(ranks, strategy, folder):
    """Batches that are sampled one step ahead, one optimiser step each, whole and resumed."""

    def fit(max_steps, part, begun=None):
        options = {"group_size": 2, "entropy_coefficient": 0.1, "mask_truncated": False}
        options |= {"sample_ahead": True, "sampler_cap": 2.0}
        ours = module(options, sampling=Sampling(max_response_length=8), engine=Elsewhere())
        data = ArithmeticData(num_train=20, num_val=2, prompts_per_batch=5)
        where = folder / part, begun
        rank, outputs = saved_fit(ours, data, ranks, strategy, max_steps, *where, limit_val_batches=0)
        return rank, sums(ours.policy.parameters()), [output.batch.texts for output in outputs]

    rank, whole, texts = fit(3, "whole")
    _, _, first = fit(2, "begun")
    _, resumed, left = fit(3, "resumed", folder / "begun")
    return {"rank": rank, "weights": [whole, resumed], "texts": [texts, first + left]}
