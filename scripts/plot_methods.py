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

import pandas
from PIL import Image

from grail_lightning import ArithmeticTask, Step
from grail_lightning.app.cli.app import main
from grail_lightning.app.views.heatmap import HEIGHT, ShownRollout, heatmap

METHODS = {
    "Uniform (Dr. GRPO)": ["--model.credit=Uniform"],
    "GRAIL": ["--model.credit=GRAIL"],
    "OAR-G": ["--model.credit=OARGradient"],
    "HighEntropy": ["--model.credit=HighEntropy"],
    "GRAIL, shuffled": ["--model.credit=GRAIL", "--model.control=Shuffled"],
}
TASK = ArithmeticTask()


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


def side_by_side(picture: Image.Image, number: int, columns: int = 3) -> Image.Image:
    """Rollouts of equally many lines in columns, between the prompt, which has one line, and the legend of three."""
    margin, lines = HEIGHT // 2, picture.height // HEIGHT - 1
    block, width = (lines - 4) // number * HEIGHT, picture.width // columns
    rows = -(-number // columns)
    tiled = Image.new("RGB", (picture.width, picture.height - (number - rows) * block), "white")
    first, legend = margin + HEIGHT, picture.height - margin - 3 * HEIGHT
    tiled.paste(picture.crop((0, 0, picture.width, first)))
    for k in range(number):
        part = picture.crop((0, first + k * block, width, first + (k + 1) * block))
        tiled.paste(part, (k % columns * width, first + k // columns * block))
    tiled.paste(picture.crop((0, legend, picture.width, picture.height)), (0, first + rows * block))
    return tiled


def draw(tables: dict[str, pandas.DataFrame], which: int, file: Path) -> None:
    """The response once for each method, as TensorBoard's pictures show it."""
    row = next(iter(tables.values())).loc[which]
    rollouts = [
        ShownRollout(
            title=name,
            text=row["response"],
            tokens=list(zip(row["token_starts"], row["token_stops"], strict=True)),
            weights=table.loc[which, "weights"].tolist(),
            steps=steps_of(row),
        )
        for name, table in tables.items()
    ]
    prompt = f"{row['prompt']} Right: {row['reference']}."
    side_by_side(Image.fromarray(heatmap(prompt, rollouts)), len(rollouts)).save(file, optimize=True)


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
