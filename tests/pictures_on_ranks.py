"""A fit on prompts of which some have pictures, with a frozen tower, reported in JSON by each process.

python tests/pictures_on_ranks.py RANKS ddp|fsdp2 MODEL TABLE
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch

from grail_lightning.credit import GRAIL
from grail_lightning.step.options import Execution, Objective
from tests.runs import Watch, strategy_of, trainer
from tests.steps import sums
from tests.test_picture_runs import data_of, module_of


def main(ranks, strategy, model, table):
    torch.set_num_threads(1)
    objective = Objective(mask_truncated=False, kl_coefficient=0.1)
    execution = Execution(group_size=2, token_budget=100, share_prefixes=False)
    changes = {"credit": GRAIL(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    module, watch = module_of(model, objective=objective, execution=execution, **changes), Watch()
    run = trainer(2, watch, devices=ranks, strategy=strategy_of(strategy, ranks))
    run.fit(module, data_of(table))
    texts = [output.batch.texts for output in watch.outputs]
    print("\n" + json.dumps({"rank": run.global_rank, "weights": sums(module.policy.parameters()), "texts": texts}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
