"""Make the data of recorded training runs, which the benchmark of token credit compares a method with.

    python scripts/make_training_data.py

It reads the tables of the studies (docs/results) of which `grail_lightning.app.benchmark.training` has the worlds. The
options of each run must be those that its study would have today, and all runs of a seed must begin alike.
"""

import csv
import json
import shlex
from pathlib import Path

from study_tables import curve

from grail_lightning.app.benchmark.recorded import FILE, FIRST_BATCH, settings_of
from grail_lightning.app.benchmark.training import ARMS, SETTINGS, content_of
from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.results.differences import CURVE
from grail_lightning.app.sweep import runs_of

ROOT = Path(__file__).parents[1]


def world_of(name: str, parser: FitOptions) -> dict | None:
    """The recorded runs of a world; None without any."""
    setting = SETTINGS[name]
    with (ROOT / f"docs/results/study_{setting.study}.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["task"] == setting.task]
    if not rows:
        return None
    today = runs_of(content_of(name, {"uniform": ARMS["uniform"]}, 1, "runs"))[0]
    point = {f"--{option}={value}" for option, value in today.point.items()}
    common = [given for given in today.options if given not in ("--model.credit=Uniform", *point)]
    starts, runs = {}, {}
    for row in sorted(rows, key=lambda row: (row["options"], int(row["seed"]))):
        given = shlex.split(row["options"])
        if not {*common} <= {*given}:
            raise SystemExit(f"{row['run']}: its options must hold {common}, but got {given}. Run the study again.")
        accuracy, first = curve(row, CURVE), curve(row, FIRST_BATCH)
        start = [accuracy[0], first[min(first)]]
        if starts.setdefault(row["seed"], start) != start:
            raise SystemExit(f"{row['run']}: all runs of a seed must begin alike, but got {start}.")
        of_arm = shlex.join(option for option in given if option not in common)
        runs.setdefault(of_arm, {})[row["seed"]] = accuracy
    settings = settings_of(parser.parse(today.arguments).as_dict())
    return {"source": f"docs/results/study_{setting.study}.csv", "common": common, "settings": settings} | {
        "starts": dict(sorted(starts.items(), key=lambda item: int(item[0]))),
        "runs": runs,
    }


def as_json(worlds: dict) -> str:
    """The file: one line for each arm at each point, so that changes can be read."""
    parts = []
    for name, world in worlds.items():
        runs = ",\n".join(f"   {json.dumps(arm)}: {json.dumps(seeds)}" for arm, seeds in world["runs"].items())
        others = "".join(f'  "{key}": {json.dumps(world[key])},\n' for key in world if key != "runs")
        parts.append(f' "{name}": {{\n{others}  "runs": {{\n{runs}\n  }}\n }}')
    return '{"worlds": {\n' + ",\n".join(parts) + "\n}}\n"


def main() -> None:
    """Write the file."""
    parser = FitOptions()
    worlds = {name: world for name in SETTINGS if (world := world_of(name, parser))}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(as_json(worlds))


if __name__ == "__main__":
    main()
