"""A row for each token, with the weights of two methods beside each other."""

import pandas

table = pandas.read_parquet("runs/saliency/predictions.parquet")
columns = ["tokens", "weights", "weights.OARGradient"]
print(table[columns].explode(columns))
