"""Four optimiser steps with sharded weights, whole and interrupted after two; printed as JSON.

python tests/interrupted.py RANKS FOLDER GRAIL|PRIME
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch

from grail_lightning.callbacks import ExportPolicy, LastCheckpoint
from grail_lightning.credit import GRAIL, PRIME
from grail_lightning.runtime.collectives import whole_tensor
from tests.runs import Watch, batches, module, strategy_of, trainer

CREDITS = {
    "GRAIL": GRAIL,
    "PRIME": lambda: PRIME(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), double_forward=True),
}


def fit(ranks, max_steps, credit, folder, *callbacks, checkpoint=None):
    """Ends after `max_steps` optimiser steps, two a batch, with a checkpoint in `folder`."""
    ours = module(
        {"updates_per_batch": 2, "token_budget": 100, "kl_coefficient": 0.05},
        credit=CREDITS[credit](),
    )
    callbacks = [LastCheckpoint(every_n_batches=1, folder=str(folder)), *callbacks]
    sharded = strategy_of("fsdp2", ranks)
    changes = {"devices": ranks, "strategy": sharded, "use_distributed_sampler": False, "enable_checkpointing": True}
    run = trainer(max_steps, *callbacks, **changes)
    run.fit(ours, batches(1), ckpt_path=checkpoint)
    return ours, run


def sums(parameters):
    """One figure a tensor, of all of its entries in their order."""
    whole = [whole_tensor(p).double().flatten() for p in parameters]
    return [(w * torch.linspace(1, 2, len(w), dtype=torch.float64)).sum().item() for w in whole]


def second(module):
    """The figures of the model that the credit method trains, if there is one."""
    return [] if module.second is None else sums(module.second.policy.parameters())


def main(ranks, folder, credit):
    torch.set_num_threads(1)
    folder = Path(folder)
    watches = {"whole": Watch(), "resumed": Watch()}
    whole, _ = fit(ranks, 4, credit, folder / "whole", watches["whole"])
    fit(ranks, 2, credit, folder / "begun")
    callbacks = [watches["resumed"], ExportPolicy(folder=str(folder / "export"))]
    ours, run = fit(ranks, 4, credit, folder / "resumed", *callbacks, checkpoint=str(folder / "begun" / "last.ckpt"))
    report = {
        "rank": run.global_rank,
        "weights": {"whole": sums(whole.policy.parameters()), "resumed": sums(ours.policy.parameters())},
        "second": {"whole": second(whole), "resumed": second(ours)},
        "texts": {name: watch.outputs[-1].batch.texts for name, watch in watches.items()},
        "norms": {name: watch.outputs[-1].metrics["grad_norm"] for name, watch in watches.items()},
    }
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
