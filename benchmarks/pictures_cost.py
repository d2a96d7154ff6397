"""The time that pictures of the credit take in the quickstart.

    python benchmarks/pictures_cost.py                          # the packaged policy, complete runs
    python benchmarks/pictures_cost.py --steps 40 --pairs 3

Runs configs/quickstart.yaml in this process with and without `CreditPictures`, in turns, so that both meet the same
load. Prints the seconds of the training loop, the seconds that the callback has measured itself and their share, and
checks that both runs end with the same weights. The callback's own figure is the one to read on a busy machine: the
difference of two runs is the noise between them.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch.optim import AdamW

from grail_lightning import ArithmeticData, GrailModule
from grail_lightning.batch import Sampling
from grail_lightning.callbacks import CreditPictures, RolloutTable, Throughput
from grail_lightning.credit import GRAIL
from grail_lightning.step.options import Execution


class Clock(Callback):
    """The seconds of the training loop."""

    def on_train_start(self, trainer, pl_module):
        self.start = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        self.seconds = time.perf_counter() - self.start


def run(steps: int, folder: Path, pictures: CreditPictures) -> tuple[float, float, int, torch.Tensor]:
    """The seconds of a run and of its pictures, their number, and the sum of all weights at its end."""
    seed_everything(0, verbose=False)
    clock = Clock()
    sampling = Sampling(max_response_length=64)
    execution = Execution(mini_batches=2, token_budget=1024)
    module = GrailModule(
        "arithmetic",
        sampling,
        credit=GRAIL(),
        execution=execution,
        optimizer=lambda p: AdamW(p, lr=1e-4, weight_decay=0.0),
    )
    logger = TensorBoardLogger(folder, name="", version="")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=logger,
        callbacks=[RolloutTable(), Throughput(), pictures, clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, ArithmeticData(prompts_per_batch=16))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    number = len(tags.Images("credit/rollouts")) if tags.Tags()["images"] else 0
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return clock.seconds, pictures.seconds, number, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shares, with_, without = [], [], []
    print("| pictures | seconds | of these drawing | share | number of pictures |")
    print("|---|--:|--:|--:|--:|")
    for _ in range(options.pairs):
        ends = []
        for every, times in ((10, with_), (0, without)):
            with tempfile.TemporaryDirectory() as folder:
                seconds, drawing, number, weights = run(
                    options.steps, Path(folder), CreditPictures(every_n_batches=every)
                )
            times.append(seconds)
            ends.append(weights)
            if every:
                shares.append(drawing / seconds)
            print(
                f"| {'on' if every else 'off'} | {seconds:.1f} | {drawing:.2f} | {drawing / seconds:.2%} | {number} |"
            )
        assert torch.equal(*ends), "pictures must not change the run"
    print(f"\nmedian share of drawing: {statistics.median(shares):.2%}")
    print(f"median seconds with and without: {statistics.median(with_):.1f}, {statistics.median(without):.1f}")


if __name__ == "__main__":
    main()
