"""The share of right samples of each problem of a test, and the longest wrong response."""

from pathlib import Path

import pandas

from grail_lightning import read_evaluation, read_samples

folder = Path("runs/quickstart/test/samples")
print(read_evaluation(folder)["model"]["digest"])
samples = pandas.DataFrame(read_samples(folder))
print(samples.groupby(["dataset", "index"])["correct"].mean())
print(samples[~samples["correct"]].sort_values("num_tokens")["response"].tail(1).item())
