"""The runs of a sweep, read from its YAML file. This module does not import torch."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from grail_lightning.cli.config_files import read_options

KEYS = ("config", "folder", "options", "methods", "tasks", "seeds", "grid", "choose")
OF_A_METHOD = ("seeds", "grid")
# What the sweep itself sets for each run.
OURS = ("seed_everything", "ckpt_path", "trainer.logger", "trainer.default_root_dir")
Statistic = Literal["last", "mean"]
_UNSAFE = re.compile(r"[^\w.,=+-]+")  # What a folder's name should not have.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the best point of a grid is chosen.

    Attributes:
        seeds: The seeds of the runs that choose.
        by: The tag of a curve in the runs' event files, of which more is better.
        statistic: The last value of the curve, or the mean of its values (the area under it).
    """

    seeds: tuple[int, ...]
    by: str = "val/accuracy"
    statistic: Statistic = "last"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: The name of its folder.
        folder: Its folder.
        method: The name of its method.
        task: The name of its task.
        seed: Its seed.
        configs: Its config files, in their order.
        options: Its overrides, without those of its point.
        point: Its values of the grid's options; None until they are chosen.
        choosing: Whether the run serves to choose a point, and is not reported.
    """

    name: str
    folder: Path
    method: str
    task: str
    seed: int
    configs: tuple[str, ...]
    options: Mapping[str, Any]
    point: Mapping[str, Any] | None
    choosing: bool = False

    @property
    def group(self) -> tuple[str, str]:
        """The method and the task, within which a point is chosen."""
        return self.method, self.task

    @property
    def values(self) -> Mapping[str, Any]:
        """Its values of the grid's options, as far as there is a grid and they are chosen."""
        return self.point or {}

    @property
    def title(self) -> str:
        """The run in words."""
        at = f" at {described(self.values)}" if self.values else ""
        return f"{self.method}, {self.task}, seed {self.seed}{at}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A sweep.

    Attributes:
        file: Its YAML file.
        folder: The folder that holds the folders of its runs.
        runs: Its runs, those that choose first.
        choice: How points are chosen; None without a choice.
    """

    file: Path
    folder: Path
    runs: tuple[Run, ...]
    choice: Choice | None

    @property
    def choosing_folder(self) -> Path:
        """The folder of the runs that choose, beside that of the runs that are reported."""
        return self.folder.with_name(f"{self.folder.name}_choosing")

    def choosing(self, group: tuple[str, str]) -> list[Run]:
        """The runs that choose the point of a method on a task."""
        return [run for run in self.runs if run.choosing and run.group == group]


def read_study(file: Path, output: Path | None = None) -> Study:
    """The sweep of a YAML file.

    Args:
        file: The file.
        output: The folder of the runs; None for that of the file.

    Raises:
        ValueError: If the file does not describe a sweep.
    """
    content = read_options(file, "The file of a sweep")
    _check_keys(file, content)
    named = content.get("folder")
    if output is None and not (isinstance(named, str) and named.strip()):
        raise ValueError(f"`folder` in {file} must be the folder of the runs, as `runs/study`, but got {named!r}.")
    folder = Path(str(named)) if output is None else output
    study = Study(file=file, folder=folder, runs=(), choice=_choice(content.get("choose"), file))
    runs = tuple(_runs(content, study))
    seen: dict[str, Run] = {}
    for run in runs:
        other = seen.setdefault(str(run.folder).casefold(), run)
        if other is not run:
            raise ValueError(
                f"The runs of a sweep must have folders of their own, but in {file} {other.title} and {run.title} "
                f"both have {run.folder}. Rename one of them."
            )
    return replace(study, runs=runs)


def described(point: Mapping[str, Any]) -> str:
    """A point of the grid in words, by the last parts of the options' names."""
    return ", ".join(f"{name.rpartition('.')[2]}={shown(value)}" for name, value in point.items())


def file_name(*parts: str) -> str:
    """Names as one name of a file or folder."""
    return "__".join(_UNSAFE.sub("_", part) for part in parts)


def shown(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else json.dumps(value)


def _runs(content: Mapping[str, Any], study: Study) -> Iterator[Run]:
    """The runs that choose, and then those that are reported, seed by seed."""
    reported: list[Run] = []
    for group in _groups(content, study.file):
        if study.choice is None or len(group.points) == 1:
            reported += [group.run(study.folder, seed, point) for point in group.points for seed in group.seeds]
            continue
        if common := set(group.seeds) & set(study.choice.seeds):
            raise ValueError(
                f"`choose.seeds` in {study.file} must be other seeds than those that are reported, but "
                f"{group.method!r} reports {min(common)}, too. Take other seeds to choose on."
            )
        for point, seed in itertools.product(group.points, study.choice.seeds):
            yield group.run(study.choosing_folder, seed, point, choosing=True)
        reported += [group.run(study.folder, seed, None) for seed in group.seeds]
    # Seed by seed, so that a sweep that is cut short has compared all methods on the same seeds.
    order = list(dict.fromkeys(run.seed for run in reported))
    yield from sorted(reported, key=lambda run: order.index(run.seed))


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A method on a task: what its runs have in common, their seeds, and the points of their grid."""

    method: str
    task: str
    configs: tuple[str, ...]
    options: Mapping[str, Any]
    seeds: Sequence[int]
    points: Sequence[Mapping[str, Any]]

    def run(self, folder: Path, seed: int, point: Mapping[str, Any] | None, choosing: bool = False) -> Run:
        """A run. Without a choice, the points of a grid have folders of their own beside each other."""
        method = f"{self.method} {described(point)}" if point else self.method
        name = file_name(method, self.task, str(seed))
        return Run(
            name=name,
            folder=folder / name,
            method=self.method,
            task=self.task,
            seed=seed,
            configs=self.configs,
            options=self.options,
            point=point,
            choosing=choosing,
        )


def _groups(content: Mapping[str, Any], file: Path) -> Iterator[_Group]:
    """The methods on the tasks."""
    shared = _mapping(content.get("options"), "options", file)
    tasks = _named(content, "tasks", file)
    for (method, given), (task, of_task) in itertools.product(_named(content, "methods", file).items(), tasks.items()):
        settings = {key: given.get(key, content.get(key)) for key in OF_A_METHOD}
        of_method = {key: value for key, value in given.items() if key not in OF_A_METHOD}
        points = _points(settings["grid"], method, file)
        _check_options(file, {"options": shared})
        _check_options(file, {f"tasks.{task}": of_task, f"methods.{method}": of_method, "the grid": points[0]})
        parts = (content, shared, of_task, of_method)
        yield _Group(
            method=method,
            task=task,
            configs=tuple(name for part in parts for name in _configs(part.get("config"), file)),
            options={name: value for part in parts[1:] for name, value in part.items() if name != "config"},
            seeds=_seeds(settings["seeds"], f"`seeds` of {method!r}", file),
            points=points,
        )


def _check_keys(file: Path, content: Mapping[str, Any]) -> None:
    for key in content:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else f" It has {', '.join(KEYS)}."
            raise ValueError(f"There is no key `{key}` in the file of a sweep, but {file} has it.{hint}")


def _named(content: Mapping[str, Any], key: str, file: Path) -> dict[str, dict[str, Any]]:
    """Methods or tasks, by their names."""
    given = content.get(key)
    if not isinstance(given, dict) or not given:
        example = "{GRPO: {model.credit: Uniform}}" if key == "methods" else "{quickstart: {}}"
        raise ValueError(f"`{key}` in {file} must hold at least one name with its options, as `{example}`.")
    for name in given:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ValueError(f"A name under `{key}` in {file} must be text in one line, but got {name!r}. Quote it.")
    return {name: _mapping(options, f"{key}.{name}", file) for name, options in given.items()}


def _mapping(given: object, where: str, file: Path) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"`{where}` in {file} must hold options of `fit` and their values, as `{{model.credit: GRAIL}}`, but got "
            f"{given!r}."
        )
    return given


def _check_options(file: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that no part sets an option that is the sweep's or another part's."""
    setter: dict[str, str] = {}
    for where, options in parts.items():
        for name in options:
            if name.startswith("-"):
                raise ValueError(f"`{where}` in {file} must name options without dashes, but got {name!r}.")
            if any(name == ours or name.startswith(f"{ours}.") for ours in OURS):
                remedy = "List the seeds under `seeds`." if name == OURS[0] else "Leave it out, or set it in `config`."
                raise ValueError(f"`{name}` must not be set by `{where}` in {file}: the sweep sets it. {remedy}")
            if name != "config" and (other := setter.setdefault(name, where)) != where:
                raise ValueError(f"`{name}` must be set once, but in {file} both {other} and {where} set it.")


def _configs(given: object, file: Path) -> list[str]:
    """Config files of `fit`: one name, or a list of names."""
    names: list[Any] = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"`config` in {file} must be the path of a config file, or a list of them, but got {given!r}.")
    return names


def _seeds(given: object, what: str, file: Path) -> tuple[int, ...]:
    seeds = given if isinstance(given, list) else []
    valid = bool(seeds) and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not valid or len(set(seeds)) < len(seeds):
        raise ValueError(f"{what} in {file} must be a list of different integers from 0 on, but got {given!r}.")
    return tuple(seeds)


def _points(given: object, method: str, file: Path) -> list[dict[str, Any]]:
    """The points of a grid, the first option outermost; one without options if there is no grid."""
    grid = _mapping(given, f"grid of {method}", file)
    for name, values in grid.items():
        if not isinstance(values, list) or not values or len({shown(value) for value in values}) < len(values):
            raise ValueError(f"`grid.{name}` in {file} must be a list of different values, but got {values!r}.")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _choice(given: object, file: Path) -> Choice | None:
    if given is None:
        return None
    options = _mapping(given, "choose", file)
    if unknown := options.keys() - {"seeds", "by", "statistic"}:
        raise ValueError(f"`choose` in {file} has seeds, by and statistic, but got {', '.join(sorted(unknown))}.")
    statistic, by = options.get("statistic", Choice.statistic), options.get("by", Choice.by)
    if statistic not in get_args(Statistic):
        raise ValueError(f"`choose.statistic` in {file} must be last or mean, but got {statistic!r}.")
    if not isinstance(by, str):
        raise ValueError(f"`choose.by` in {file} must be the tag of a curve, as val/accuracy, but got {by!r}.")
    return Choice(seeds=_seeds(options.get("seeds"), "`choose.seeds`", file), by=by, statistic=statistic)
