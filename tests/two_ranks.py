"""Short runs on two CPU processes, printed as JSON by each; `tests/test_ranks.py` starts it.

python tests/two_ranks.py ddp|fsdp2 GRAIL|DGPO|OARGradient ...
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch

import grail_lightning.credit
from grail_lightning.data import ArithmeticData
from grail_lightning.runtime.collectives import whole_tensor
from tests.draws import without_ties
from tests.runs import Watch, module, strategy_of, trainer


def run_case(strategy, credit):
    """Fit, validate and report."""
    # A small budget gives the ranks different numbers of micro-batches; five problems, uneven shares.
    # Rows apart, so that replicated and sharded weights round alike.
    ours = module(
        {"updates_per_batch": 2, "token_budget": 100, "kl_coefficient": 0.05, "share_prefixes": False},
        credit=getattr(grail_lightning.credit, credit)(),
    )
    data = ArithmeticData(num_train=64, num_val=5, prompts_per_batch=4, eval_prompts_per_batch=4)
    watch = Watch()
    run = trainer(4, watch, devices=2, strategy=strategy_of(strategy), num_sanity_val_steps=0)
    with without_ties():  # The texts of both strategies are compared.
        run.fit(ours, data)
    run.validate(ours, data, verbose=False)
    report = {
        "rank": run.global_rank,
        "weights": [whole_tensor(p).double().square().sum().item() for p in ours.policy.parameters()],
        "texts": watch.outputs[-1].batch.texts,
        "metrics": {k: v for k, v in watch.outputs[-1].metrics.items() if not k.startswith("time/")},
    }
    print("\n" + json.dumps(report), flush=True)


def main(strategy, *credits):
    torch.set_num_threads(1)
    for credit in credits:
        run_case(strategy, credit)


if __name__ == "__main__":
    main(*sys.argv[1:])
