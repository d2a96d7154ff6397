"""How tests run the real `test`: the packaged policy on a few sums, with its samples kept.

As a program: python tests/evaluate/tested.py FOLDER RANKS [ddp|fsdp2], which prints the table and the logged figures.
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import Callback, seed_everything

from grail_lightning.batch import Sampling
from grail_lightning.callbacks import Evaluation
from grail_lightning.data import ArithmeticData
from grail_lightning.evaluate import read_samples
from tests.draws import without_ties
from tests.runs import module, strategy_of, trainer

SEED = 2
SAMPLING = Sampling(max_response_length=40)


class Interrupts(Callback):
    """Ctrl-C before the second batch of a test."""

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            raise KeyboardInterrupt


def run_test(folder, *callbacks, ours=None, data=None, sampling=SAMPLING, num_problems=7, **changes):
    """Test, and return the logged figures."""
    options = {"num_samples": 3, "sampling": sampling, "pass_at": (1, 2, 3), "maj_at": (2, 3)}
    kept = {name: changes.pop(name) for name in list(changes) if name in ("by", *options)}
    evaluation = Evaluation(**(options | kept))
    data = data or ArithmeticData(num_test=num_problems, eval_prompts_per_batch=3)
    run = trainer(-1, evaluation, *callbacks, default_root_dir=str(folder), **changes)
    (found,) = run.test(ours or module(), data, verbose=False)
    return found


def rows_of(folder):
    """The kept samples without texts, in the order of the data."""
    found = [(s.dataset, s.index, s.sample, s.correct, s.num_tokens, s.response) for s in read_samples(folder)]
    return sorted(found)


def main(folder, ranks, strategy="ddp"):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    seed_everything(SEED, verbose=False)
    with without_ties():  # Other neighbours in a batch may round differently.
        chosen = strategy_of(strategy) if int(ranks) > 1 else "auto"
        found = run_test(Path(folder), devices=int(ranks), strategy=chosen)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
