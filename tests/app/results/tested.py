"""How tests run the real `test`: the packaged policy on a few sums, with its samples kept.

As a program: python tests/app/results/tested.py FOLDER RANKS STRATEGY, which prints the table and the logged figures.
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from grail_lightning import ArithmeticData, Evaluation, Sampling, read_samples
from tests.draws import without_ties
from tests.runs import module, strategy_of, trainer

SAMPLING = Sampling(max_response_length=40)


def run_test(folder, *callbacks, ours=None, sampling=SAMPLING, num_problems=4, **changes):
    """Test on problems in batches of three, and return the logged figures."""
    evaluation = Evaluation(num_samples=3, sampling=sampling, pass_at=(1, 2, 3), maj_at=(2, 3))
    data = ArithmeticData(num_test=num_problems, eval_prompts_per_batch=3)
    run = trainer(-1, evaluation, *callbacks, default_root_dir=str(folder), **changes)
    (found,) = run.test(ours or module(), data, verbose=False)
    return found


def rows_of(folder):
    """The kept samples without texts, in the order of the data."""
    names = ("dataset", "index", "sample", "correct", "num_tokens", "response")
    return sorted(tuple(sample[name] for name in names) for sample in read_samples(folder))


def main(folder, ranks, strategy):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with without_ties():  # Other neighbours in a batch may round differently.
        found = run_test(Path(folder), devices=int(ranks), strategy=strategy_of(strategy))
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
