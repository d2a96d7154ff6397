"""The tokens of the largest weight of each wrong response of a prediction."""

import pandas

for _, row in pandas.read_parquet("runs/saliency/predictions.parquet").iterrows():
    if not row["correct"]:
        heaviest = row["weights"].argsort()[::-1][:3]
        print(row["reference"], repr(row["response"]), [row["tokens"][token] for token in heaviest])
