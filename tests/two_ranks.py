"""A short run on two CPU processes, printed as JSON by each; `tests/test_ranks.py` starts it.

python tests/two_ranks.py ddp|fsdp2 GRAIL|OARGradient|Uniform
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

import grail_lightning.credit
from grail_lightning.data import ArithmeticData
from tests.draws import without_ties
from tests.runs import Watch, module, trainer


def main(strategy, credit):
    torch.set_num_threads(1)
    # A small budget gives the ranks different numbers of micro-batches; five problems, uneven shares.
    # Rows apart, so that replicated and sharded weights round alike.
    ours = module(
        {"updates_per_batch": 2, "token_budget": 100, "kl_coefficient": 0.05, "share_prefixes": False},
        credit=getattr(grail_lightning.credit, credit)(),
    )
    data = ArithmeticData(num_train=64, num_val=5, prompts_per_batch=4, eval_prompts_per_batch=4)
    watch = Watch()
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(4, watch, devices=2, strategy=sharded if strategy == "fsdp2" else strategy, num_sanity_val_steps=0)
    with without_ties():  # The texts of both strategies are compared.
        run.fit(ours, data)
    run.validate(ours, data, verbose=False)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in ours.policy.parameters()]
    report = {
        "rank": run.global_rank,
        "weights": [p.detach().double().square().sum().item() for p in whole],
        "texts": watch.outputs[-1].batch.texts,
        "metrics": {k: v for k, v in watch.outputs[-1].metrics.items() if not k.startswith("time/")},
    }
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
