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

from grail_lightning import GrailModule, MathData
from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL
from grail_lightning.data import DatasetSpec
from grail_lightning.step.options import Execution, Objective
from grail_lightning.tasks.answered import MathTask
from tests.runs import Watch, strategy_of, trainer
from tests.seeing import letters
from tests.steps import sums


def main(ranks, strategy, model, table):
    torch.set_num_threads(1)
    module = GrailModule(
        model,
        sampling=Sampling(max_response_length=8),
        execution=Execution(group_size=2, token_budget=100, share_prefixes=False),
        objective=Objective(mask_truncated=False, kl_coefficient=0.1),
        credit=GRAIL(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    task, watch = MathTask(instruction="", rewards=[letters]), Watch()
    data = MathData(train=DatasetSpec(table, images="picture"), task=task, prompts_per_batch=2)
    run = trainer(2, watch, devices=ranks, strategy=strategy_of(strategy, ranks))
    run.fit(module, data)
    texts = [output.batch.texts for output in watch.outputs]
    print("\n" + json.dumps({"rank": run.global_rank, "weights": sums(module.policy.parameters()), "texts": texts}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
