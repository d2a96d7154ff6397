"""Runs on two CPU processes that sample one step ahead, whole and resumed; `tests/test_ahead.py` starts it.

python tests/ahead_on_ranks.py ddp|fsdp2 FOLDER
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch

from grail_lightning.batch import Sampling
from grail_lightning.callbacks import LastCheckpoint
from grail_lightning.data import ArithmeticData
from tests.elsewhere import Elsewhere
from tests.interrupted import sums
from tests.runs import Watch, module, strategy_of, trainer


def fit(strategy, max_steps, folder, path=None):
    """One optimiser step a batch."""
    objective = {"group_size": 2, "entropy_coefficient": 0.1, "mask_truncated": False}
    objective |= {"sample_ahead": True, "sampler_cap": 2.0}
    ours = module(objective, sampling=Sampling(max_response_length=8), engine=Elsewhere())
    data = ArithmeticData(num_train=20, num_val=2, prompts_per_batch=5)
    watch, saver = Watch(), LastCheckpoint(folder=str(folder), every_n_batches=1)
    changes = {"devices": 2, "strategy": strategy_of(strategy), "enable_checkpointing": True}
    run = trainer(max_steps, watch, saver, limit_val_batches=0, **changes)
    run.fit(ours, data, ckpt_path=path, weights_only=None if path is None else True)
    return run.global_rank, sums(ours.policy.parameters()), [output.batch.texts for output in watch.outputs]


def main(strategy, folder):
    torch.set_num_threads(1)
    folder = Path(folder)
    rank, whole, texts = fit(strategy, 4, folder / "whole")
    _, _, begun = fit(strategy, 2, folder / "begun")
    _, resumed, left = fit(strategy, 4, folder / "resumed", str(folder / "begun" / "last.ckpt"))
    report = {"rank": rank, "weights": [whole, resumed], "texts": [texts, begun + left]}
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
