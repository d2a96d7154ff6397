"""A fit on prompts of which some have pictures, with a frozen tower, reported in JSON by each process.

python tests/pictures_on_ranks.py RANKS auto|ddp|fsdp2 sampled|written MODEL TABLE
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch

from grail_lightning.credit import GRAIL
from grail_lightning.engines import RolloutEngine, build_batch
from grail_lightning.step.options import Execution, Objective
from tests.runs import Watch, strategy_of, trainer
from tests.steps import sums
from tests.test_picture_runs import data_of, module_of


class Written(RolloutEngine):
    """An engine whose responses depend on the prompt alone, and not on the rank."""

    takes_pictures = True

    def update_weights(self, policy):
        self.policy = policy

    def generate(self, prompts, group_size, sampling, seed):
        seeds = [10 * int(prompt.reference) + k for prompt in prompts for k in range(group_size)]
        ids = [torch.randint(8, 99, (4,), generator=torch.Generator().manual_seed(own)).tolist() for own in seeds]
        return build_batch(self.policy, prompts, group_size, ids, [True] * len(ids))


def main(ranks, strategy, engine, model, table):
    torch.set_num_threads(1)
    objective = Objective(mask_truncated=False, kl_coefficient=0.1)
    execution = Execution(group_size=2, token_budget=100, share_prefixes=False)
    changes = {
        "engine": Written() if engine == "written" else None,
        "credit": GRAIL(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    module, watch = module_of(model, objective=objective, execution=execution, **changes), Watch()
    run = trainer(2, watch, devices=ranks, strategy=strategy_of(strategy, ranks))
    run.fit(module, data_of(table))
    texts = [output.batch.texts for output in watch.outputs]
    print("\n" + json.dumps({"rank": run.global_rank, "weights": sums(module.policy.parameters()), "texts": texts}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
