"""The share of right answers and the mean length of each step of a run with `KeepRollouts`."""

import pandas

rollouts = pandas.read_parquet("runs/example/rollouts")
print(rollouts.groupby("step")[["correct", "num_tokens"]].mean())
print(rollouts.loc[rollouts["status"] == "wrong", ["prompt", "reference", "response"]].head())
