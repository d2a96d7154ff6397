r"""Files of problems through the real `test`, with the packaged policy and with answers of a known error rate.

    python benchmarks/benchmark_files.py FOLDER                        # the files of configs/eval_math.yaml, all rows
    python benchmarks/benchmark_files.py FOLDER --policy arithmetic    # the packaged policy samples, at a small cap

The stand-in engine boxes the reference with the probability ``1 - error_rate``, else a wrong answer that no other
sample gives. Everything else is the package's own: reading, prompts, tokens, grading, metrics, kept samples, table. So
the table has to show ``1 - error_rate`` as accuracy, and pass@k and maj@k as they follow from it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch import seed_everything

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.callbacks import Evaluation
from grail_lightning.data import DatasetSpec, MathData
from grail_lightning.engines import RolloutEngine
from grail_lightning.engines.base import build_batch
from grail_lightning.evaluate import Sample, read_samples
from grail_lightning.module import GrailModule
from grail_lightning.policy import Policy
from grail_lightning.tasks.base import Prompt

FILES = ("aime24", "amc23", "college_math", "math500", "minerva_math", "olympiadbench")


class KnownErrors(RolloutEngine):
    """Boxes the reference or a wrong answer, by the seed of each row.

    Args:
        error_rate: The probability of a wrong answer.
    """

    def __init__(self, error_rate: float) -> None:
        self.error_rate = error_rate
        self._policy: Policy | None = None

    def update_weights(self, policy: Policy) -> None:
        self._policy = policy

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        seeds = [seed + row for row in range(len(prompts) * group_size)]
        return self.generate_seeded(prompts, group_size, sampling, seeds)

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        assert self._policy is not None
        tokenizer = self._policy.tokenizer
        rows = []
        for row, seed in enumerate(seeds):
            draw = random.Random(seed)
            wrong = draw.random() < self.error_rate
            answer = f"-98765.{draw.randrange(10**9)}" if wrong else prompts[row // group_size].reference
            text = f"So the answer is \\boxed{{{answer}}}."
            rows.append([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
        return build_batch(self._policy, prompts, group_size, rows, [True] * len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder with the files")
    parser.add_argument("--names", nargs="+", default=list(FILES), help="names of files, without .jsonl")
    parser.add_argument("--limit", type=int, help="the first rows of each file (default: every row)")
    parser.add_argument("--error_rate", type=float, default=0.3)
    parser.add_argument("--policy", help="sample from this policy instead: arithmetic, or a folder")
    parser.add_argument("--tokens", type=int, default=8, help="most tokens of a policy's response")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--prompts_per_batch", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    seed_everything(0, verbose=False)
    # The longest answer of the stand-in has to be within the limit.
    limit = options.tokens if options.policy else 1024
    sampling = Sampling(max_response_length=limit, temperature=options.temperature)
    engine = None if options.policy else KnownErrors(options.error_rate)
    module = GrailModule(options.policy or "arithmetic", sampling=sampling, engine=engine)
    data = MathData(
        test=[DatasetSpec(name, name=name, limit=options.limit) for name in options.names],
        folder=options.folder,
        eval_prompts_per_batch=options.prompts_per_batch,
    )
    n = options.samples
    evaluation = Evaluation(
        num_samples=n, pass_at=(1, n) if n > 1 else (1,), maj_at=(n,) if n > 1 else (), by=("level",)
    )
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(default_root_dir=folder, accelerator="cpu", devices=1, callbacks=[evaluation], **quiet)
        began = time.perf_counter()
        trainer.test(module, data, verbose=False)
        seconds = time.perf_counter() - began
        samples = list(read_samples(Path(folder) / "test" / "samples"))
    problems = len({(sample.dataset, sample.index) for sample in samples})
    print(f"\n{problems} problems, {len(samples)} samples, {seconds:.0f} s")
    print("verdicts:", dict(Counter(sample.status for sample in samples).most_common()))
    if engine is not None:
        expected(samples, options.error_rate, n)


def expected(samples: Sequence[Sample], error_rate: float, n: int) -> None:
    """What the error rate implies, beside the draws themselves."""
    right = 1 - error_rate
    print(f"expected accuracy {right:.3f}, pass@{n} {1 - error_rate**n:.3f}", end="")
    if n == 3:  # Two or three right ones win; one has a third of a draw of three different answers.
        print(f", maj@3 {right**3 + 3 * right**2 * error_rate + 3 * right * error_rate**2 / 3:.3f}", end="")
    false = [s for s in samples if s.correct != ("-98765." not in s.response)]
    print(f"\nverdicts that differ from the draw: {len(false)} of {len(samples)}")
    for sample in false[:20]:
        print(f"  {sample.dataset} {sample.index}: {sample.status}, reference {sample.reference[:100]!r}")


if __name__ == "__main__":
    sys.exit(main())
