"""Draw docs/pictures/methods.png: the token weights that methods give to one rollout with an error.

    python scripts/plot_methods.py docs/pictures/methods.png

Runs `grail-lightning predict` with configs/saliency.yaml and 256 problems for each method. The policy, the seed and so
the responses are the same. The first response whose error is a single forgotten carry, with a sound line before it and
an inherited one behind it, is drawn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import pandas

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm

from grail_lightning.cli import main
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Step

METHODS = {
    "Uniform (GRPO)": ["--model.credit=Uniform"],
    "GRAIL": ["--model.credit=GRAIL"],
    "OAR-G": ["--model.credit=OARGradient"],
    "HighEntropy": ["--model.credit=HighEntropy"],
    "GRAIL, shuffled": ["--model.credit=GRAIL", "--model.control=Shuffled"],
}
TASK = ArithmeticTask()
LARGEST = 3.0  # Larger weights, those of GRAIL's answers, have the same colour.


def predictions(options: list[str], folder: Path) -> pandas.DataFrame:
    """The rows of a prediction."""
    file = folder / "predictions.parquet"
    quiet = ["--trainer.enable_progress_bar=false", "--predictions.page=false", f"--trainer.logger.save_dir={folder}"]
    main(
        [
            "predict",
            "--config=configs/saliency.yaml",
            "--data.num_test=256",
            f"--predictions.file={file}",
            *quiet,
            *options,
        ]
    )
    return pandas.read_parquet(file)


def steps_of(row: pandas.Series) -> list[Step]:
    """The labelled lines of a response."""
    expression = row["prompt"].removeprefix("Compute ").removesuffix(".")
    return TASK.label_steps(row["response"], TASK.prompt({"problem": expression})) or []


def is_shown(row: pandas.Series) -> bool:
    """Whether a single misconception makes a response wrong, after a sound line and before an inherited one."""
    kinds = [step.kind for step in steps_of(row)]
    once = kinds.count("misconception") == 1 and "slip" not in kinds
    return bool(row["finished"]) and once and kinds[0] == "sound" and kinds[-1] == "inherited"


def draw(tables: dict[str, pandas.DataFrame], which: int, file: Path) -> None:
    """One line of coloured tokens for each method; the wrong result has a frame."""
    row = next(iter(tables.values())).loc[which]
    # Tokens behind the answer carry no text.
    shown = [k for k, (a, b) in enumerate(zip(row["token_starts"], row["token_stops"], strict=True)) if a < b]
    flawed = [step.result for step in steps_of(row) if step.kind == "misconception"]
    figure, axes = plt.subplots(figsize=(0.3 * len(shown) + 2.2, 0.42 * len(tables) + 1.2))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=LARGEST)
    colours = plt.get_cmap("RdBu_r")
    for line, (name, table) in enumerate(tables.items()):
        weights = table.loc[which, "weights"]
        axes.text(-0.3, line + 0.5, name, ha="right", va="center", fontsize=11)
        for place, token in enumerate(shown):
            start, stop = row["token_starts"][token], row["token_stops"][token]
            text = row["response"][start:stop].replace("\n", "⏎")
            colour = colours(norm(min(weights[token], LARGEST)))
            axes.add_patch(plt.Rectangle((place, line + 0.06), 1, 0.88, facecolor=colour, edgecolor="white"))
            dark = abs(norm(min(weights[token], LARGEST)) - 0.5) > 0.35
            size = 11 if len(text) < 4 else 5
            axes.text(place + 0.5, line + 0.5, text, ha="center", va="center", size=size, color="w" if dark else "k")
            if any(start < last and stop > first for first, last in flawed):
                axes.add_patch(
                    plt.Rectangle((place, line + 0.06), 1, 0.88, fill=False, edgecolor="k", linewidth=1.6, zorder=3)
                )
    axes.set_xlim(0, len(shown))
    axes.set_ylim(len(tables), 0)
    axes.axis("off")
    axes.set_title(f"{row['prompt']}  Right: {row['reference']}. Framed: the wrong result.", loc="left", fontsize=11)
    bar = figure.colorbar(mpl.cm.ScalarMappable(norm, colours), ax=axes, fraction=0.03, pad=0.015)
    bar.set_label("weight", fontsize=10)
    bar.set_ticks([0, 0.5, 1, 2, 3], labels=["0", "0.5", "1", "2", "≥ 3"], fontsize=10)
    figure.savefig(file, dpi=150, bbox_inches="tight")


def run(file: Path) -> None:
    """Predict with each method, choose the response, and draw."""
    tables = {}
    for name, options in METHODS.items():
        with tempfile.TemporaryDirectory() as folder:
            tables[name] = predictions(options, Path(folder))
    first = next(iter(tables.values()))
    assert all((table["response"] == first["response"]).all() for table in tables.values())
    wrong = first[~first["correct"]]
    draw(tables, next(index for index, row in wrong.iterrows() if is_shown(row)), file)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
