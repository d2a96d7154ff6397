"""A step on rollouts of a policy that calls tools, by one process or two: python tests/turns_on_ranks.py FOLDER RANKS.

The first prompt of each batch calls tools up to four times; the second is answered in one turn, and has no environment
in the second batch.
"""

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch

from grail_lightning.answers import Marker
from grail_lightning.batch import Sampling
from grail_lightning.module import GrailModule
from grail_lightning.tasks import MathTask
from tests.runs import Watch, trainer
from tests.steps import configured
from tests.test_episodes import example, task_of


def main(folder, ranks):
    torch.set_num_threads(1)
    ranks = int(ranks)
    limits = {"tool_seconds": 60.0}
    many, one = (task_of(lambda: example()(9), limits | {"max_turns": turns}) for turns in (4, 1))
    plain = MathTask(answer=Marker(), instruction="")
    row = {"problem": "Go.", "answer": "7"}
    prompts = [many.prompt(row), one.prompt(row), many.prompt(row), plain.prompt(row)]
    mine = prompts[int(os.environ.get("LOCAL_RANK", "0")) :: ranks]
    what, how = configured({"kl_coefficient": 0.05, "token_budget": 300, "mask_truncated": False}, group_size=6)
    ours = GrailModule(
        folder,
        sampling=Sampling(max_response_length=24),
        objective=what,
        execution=how,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02),
    )
    loader = torch.utils.data.DataLoader(mine, batch_size=2 // ranks, collate_fn=list)
    watch = Watch()
    options = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "use_distributed_sampler": False}
    run = trainer(2, watch, precision="64-true", **options)
    run.fit(ours, loader)
    batches = [output.batch for output in watch.outputs]
    report = {
        "weights": [p.detach().flatten()[::97].tolist() for p in ours.policy.parameters()],
        "turns": [[len(episode.turns) for episode in batch.episodes or ()] for batch in batches],
        "rows": [
            {
                int(number): ids[valid].tolist()
                for number, ids, valid in zip(b.row, b.response_ids, b.valid_mask, strict=True)
            }
            for b in batches
        ],
        "loss": [output.metrics["loss"] for output in watch.outputs],
    }
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
