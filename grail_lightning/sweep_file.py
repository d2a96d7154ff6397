"""The file of a sweep: its runs, and the table of those that have finished."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grail_lightning.cli.config_files import find_config, read_options
from grail_lightning.evaluate.compare import CURVE, read_scalars
from grail_lightning.runtime.files import write_whole
from grail_lightning.tasks.import_path import did_you_mean

_KEYS = ("config", "folder", "options", "methods", "tasks", "seeds", "grid", "choose", "results")
_OURS = re.compile(r"(seed_everything|ckpt_path|trainer\.logger|trainer\.default_root_dir)(\..*)?")
_FACTS = ("run", "method", "task", "seed", "point", "choosing", "options")


class Results:
    """Rows of finished runs: what a run is, its options, and its curves as JSON, values by step, to six decimals.

    A row is added in one write, so that several sweeps may add to one file, and versions of it can be merged by line.
    """

    def __init__(self, file: Path, tags: Sequence[str]) -> None:
        self.file, self.tags, self._columns, self._lock = file, tags, [*_FACTS, *tags], threading.Lock()
        self.rows = {row["run"]: row for row in read_results(file)} if file.exists() else {}
        for row in self.rows.values():
            if list(row) != self._columns:
                raise ValueError(
                    f"`results.file` must be a table with the columns {', '.join(self._columns)}, but {file} has "
                    f"{', '.join(row)}. Name another file, or the curves of that table in `results.curves`."
                )

    def add(self, facts: Mapping[str, object], curves: Mapping[str, Mapping[int, float]]) -> None:
        """Add the row of a run."""
        cells = {**facts, **{tag: {k: round(v, 6) for k, v in values.items()} for tag, values in curves.items()}}
        row = {name: value if isinstance(value, str) else json.dumps(value) for name, value in cells.items()}
        with self._lock:
            text = io.StringIO()
            writer = csv.DictWriter(text, self._columns, lineterminator="\n")
            if not self.file.exists():
                self.file.parent.mkdir(parents=True, exist_ok=True)
                writer.writeheader()
            writer.writerow(row)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(text.getvalue())
            self.rows[row["run"]] = row


def read_results(file: Path) -> list[dict[str, str]]:
    """The rows of a table; everything is text, and `curve` reads a curve from it."""
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def curve(row: Mapping[str, str], tag: str) -> dict[int, float]:
    """A curve of a row by step; empty if the run had none."""
    return {int(step): value for step, value in json.loads(row.get(tag) or "{}").items()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep. `options` are without those of the grid, of which `point` is None until it is chosen."""

    folder: Path
    method: str
    task: str
    seed: int
    options: tuple[str, ...]
    point: Mapping[str, Any] | None
    choosing: bool  # It serves to choose a point, and is not reported.
    results: Results | None = None  # The table of finished runs, if the sweep keeps one.

    @property
    def group(self) -> tuple[str, str]:
        """For which one point is chosen."""
        return self.method, self.task

    @property
    def given(self) -> list[str]:
        """The options that the file gives, those of the point last."""
        return [*self.options, *(f"--{name}={_shown(value)}" for name, value in (self.point or {}).items())]

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``fit``; without a point, those without the options of the grid."""
        place = {"save_dir": str(self.folder.parent), "name": self.folder.name, "version": ""}
        logger = json.dumps({"class_path": "TensorBoardLogger", "init_args": place})
        ours = (f"--seed_everything={self.seed}", f"--trainer.logger={logger}", "--trainer.enable_progress_bar=false")
        return [*self.given, *ours]

    @property
    def row(self) -> dict[str, str] | None:
        """The run's row in the table of finished runs; None if it has none."""
        return self.results.rows.get(self.folder.name) if self.results else None

    def keep(self) -> None:
        """Add the run, which is finished, to the table."""
        if self.results and not self.row:
            facts = {"run": self.folder.name, "method": self.method, "task": self.task, "seed": self.seed}
            facts |= {"point": self.point, "choosing": self.choosing, "options": shlex.join(self.given)}
            self.results.add(facts, {tag: read_scalars(self.folder, tag) for tag in self.results.tags})

    def curve(self, tag: str) -> dict[int, float]:
        """A curve of the run, from the table or from its folder."""
        return curve(self.row, tag) if self.row else read_scalars(self.folder, tag)

    def record(self) -> dict[str, Any]:
        """What is known of the run; `state` is waiting, started, failed or finished."""
        if self.results and self.row:
            return {"state": "finished", "outcome": f"a row of {self.results.file}"}
        file = self.folder / "sweep.json"
        return dict(json.loads(file.read_text())) if file.is_file() else {"state": "waiting"}

    def write(self, **state: str) -> None:
        """Record the state of the run."""
        record = {"method": self.method, "task": self.task, "seed": self.seed, "arguments": self.arguments}
        record |= {"point": self.point} if self.point else {}
        record |= {"choosing": True} if self.choosing else {}
        write_whole(self.folder / "sweep.json", json.dumps(record | state, indent=1) + "\n")

    def last_line(self) -> str:
        """What the run has printed last."""
        log = self.folder / "fit.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _shown(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else json.dumps(value)


def described(point: Mapping[str, Any]) -> str:
    """A point in words, by the last parts of the options' names."""
    return ", ".join(f"{name.rpartition('.')[2]}={_shown(value)}" for name, value in point.items())


def safe(*parts: str) -> str:
    """Names as one name of a file."""
    return "__".join(re.sub(r"[^\w.,=+-]+", "_", part) for part in parts)


def read_sweep(file: Path, output: Path | None = None) -> tuple[list[Run], Mapping[str, Any]]:
    """The runs of a YAML file, those that choose first, then seed by seed, and the options of the choice.

    The runs go into `output`, or else into the `folder` of the file.
    """
    content = read_options(find_config(file), "The file of a sweep")
    for key in content.keys() - set(_KEYS):
        hint = did_you_mean(f"`{key}`", [f"`{known}`" for known in _KEYS]) or f" It has {', '.join(_KEYS)}."
        raise ValueError(f"There is no key `{key}` in the file of a sweep, but {file} has it.{hint}")
    for key in ("methods", "tasks"):
        if not content.get(key) or not isinstance(content[key], dict):
            raise ValueError(
                f"`{key}` in {file} must hold at least one name with its options, but got {content.get(key)!r}."
            )
    if output is None and not content.get("folder"):
        raise ValueError(f"`folder` in {file} must be the folder of the runs, as `runs/study`.")
    results = _results(content, file)
    runs = [replace(run, results=results) for run in _runs(content, output or Path(content["folder"]), file)]
    if len({run.folder for run in runs}) < len(runs):
        raise ValueError(f"The runs of a sweep must have folders of their own, but two names in {file} give the same.")
    # Seed by seed, so that a sweep that is cut short has compared all methods on the same seeds.
    order = list(dict.fromkeys(run.seed for run in runs))
    runs.sort(key=lambda run: (not run.choosing, not run.choosing and order.index(run.seed)))
    return runs, content.get("choose") or {}


def _results(content: Mapping[str, Any], file: Path) -> Results | None:
    asked = content.get("results")
    if asked is None:
        return None
    by = (content.get("choose") or {}).get("by", CURVE)
    if not isinstance(asked, dict) or asked.keys() - {"file", "curves"} or "file" not in asked:
        raise ValueError(f"`results` in {file} must be `file`, and `curves` if it is not [{by}], but got {asked!r}.")
    curves = asked.get("curves", [by])
    if content.get("choose") and by not in curves:
        raise ValueError(f"`results.curves` in {file} must hold {by}, by which points are chosen, but got {curves}.")
    return Results(Path(asked["file"]), curves)


def _runs(content: Mapping[str, Any], folder: Path, file: Path) -> Iterator[Run]:
    choose, common = content.get("choose") or {}, content.get("options") or {}
    for (method, of_method), (task, of_task) in itertools.product(content["methods"].items(), content["tasks"].items()):
        own, of_task = dict(of_method or {}), of_task or {}
        grid, seeds = own.pop("grid", content.get("grid") or {}), own.pop("seeds", content.get("seeds"))
        if not isinstance(seeds, list) or not all(isinstance(seed, int) for seed in seeds) or not seeds:
            raise ValueError(f"`seeds` of {method!r} in {file} must be a list of integers, but got {seeds!r}.")
        for name in {*common, *of_task, *own, *grid}:
            if _OURS.fullmatch(name):
                raise ValueError(f"`{name}` must not be set in {file}: the sweep sets it for each run.")
            if name != "config" and sum(name in part for part in (of_task, own, grid)) > 1:
                raise ValueError(f"`{name}` must be set once, but {method!r}, {task!r} or the grid in {file} share it.")
        configs = [part.get("config") or [] for part in (content, common, of_task, own)]
        files = [name for names in configs for name in ([names] if isinstance(names, str) else names)]
        options = {name: value for name, value in {**common, **of_task, **own}.items() if name != "config"}
        given = (*(f"--config={name}" for name in files), *(f"--{n}={_shown(v)}" for n, v in options.items()))
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        chosen = bool(choose) and len(points) > 1
        if chosen and (shared := set(seeds) & set(choose["seeds"])):
            raise ValueError(
                f"`choose.seeds` in {file} must be other seeds than those of {method!r}, but share {shared}."
            )
        place = folder.with_name(f"{folder.name}_choosing") if chosen else folder
        one = Run(folder=place, method=method, task=task, seed=0, options=given, point=None, choosing=chosen)
        for point, seed in itertools.product(points, choose["seeds"] if chosen else seeds):
            name = safe(f"{method} {described(point)}" if point else method, task, str(seed))
            yield replace(one, folder=place / name, seed=seed, point=point)
        for seed in seeds if chosen else ():
            yield replace(one, folder=folder / safe(method, task, str(seed)), seed=seed, choosing=False)
