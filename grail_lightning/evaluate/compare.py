"""Finds what runs have left, groups them into methods, and compares the figures of their kept samples.

A *method* is what runs have in common that differ in the seed alone. Shapes: ``N`` problems, ``S`` seeds.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from grail_lightning.evaluate.records import FACTS, Problem, Sample, problems_of, read_evaluation, read_samples
from grail_lightning.evaluate.seeds import difference, estimate
from grail_lightning.evaluate.statistics import Floats, holm, vote_noise
from grail_lightning.functional import maj_at_k, pass_at_k, pass_at_k_variance

AVERAGES = ("simple average", "weighted by size")
CHOICE = "choice__"  # What the files begin with that a sweep leaves beside the runs that choose.
_STAGES = ("test", "validate", "validation/step_*")  # Of several validations the last one counts.
# What differs between two runs of one method: the seed, and where files are.
_INCIDENTAL = [
    *("seed_everything", "ckpt_path", "trainer.logger", "trainer.default_root_dir", "trainer.enable_progress_bar"),
    *("checkpoint.dirpath", "last_checkpoint.folder", "export.folder", "predictions.file"),
]
Share = tuple[Floats, Floats]
"""A figure of each problem and seed ``[N, S]``, and its variance over other samples of the problem ``[N, S]``."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as far as it has left something."""

    # What the user gave, and the name of the method in it.
    given: str
    name: str
    folder: Path
    # The folder of the training's event files, and of kept samples; None without.
    events: Path | None
    samples: Path | None
    # What the samples belong to (``evaluation.json``), and what a sweep says of the run (``sweep.json``).
    facts: dict[str, Any]
    sweep: dict[str, Any]
    # The resolved config of the training that made the policy, or else of the evaluation.
    config: dict[str, Any]
    method: str = ""
    task: str = ""

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        seed = self.sweep.get("seed", self.config.get("seed_everything"))
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def point(self) -> str:
        """The values of a sweep's grid in words; empty without a grid."""
        named = self.sweep.get("point") or {}
        return ", ".join(f"{option.rpartition('.')[2]}={value}" for option, value in named.items())


def find_runs(given: Sequence[str]) -> list[Run]:
    """The runs that a user names: folders of runs, of their stages or of samples, each also as ``NAME=FOLDER``."""
    runs: dict[Path, Run] = {}
    for argument in given:
        if Path(argument).name.startswith((CHOICE, "choice.json")) and Path(argument).is_file():
            continue  # `FOLDER/*` names them, too.
        run = _find(argument)
        other = runs.setdefault((run.samples or run.folder).resolve(), run)
        if other is not run:
            raise ValueError(f"Each run must be given once, but {other.given} and {argument} are one. Leave one out.")
    if not runs:
        raise ValueError("A report must have at least one run. Give a folder such as runs/quickstart.")
    return list(runs.values())


def _find(argument: str) -> Run:
    name, path = "", Path(argument)
    if "=" in argument and not path.exists():
        name, _, folder_name = argument.partition("=")
        path = Path(folder_name)
    if not path.is_dir():
        raise ValueError(f"A run must be a folder, but got {path}. Give one such as runs/quickstart.")
    places = [path, path / "samples"]
    for stage in _STAGES:
        places += sorted(path.glob(f"{stage}/samples"), reverse=True)
    samples = next((place for place in places if (place / FACTS).is_file()), None)
    above = [path, *path.resolve().parents[:4]]  # Of the samples of a validation, the run's folder is the fourth.
    folder = next((place for place in above if any(place.glob("config*.yaml"))), path)
    facts = read_evaluation(samples) if samples else {}
    trained = _trained_in(folder, facts.get("model") or {})
    events = next((place for place in (folder, trained) if any(place.glob("events.out.tfevents*"))), None)
    if samples is None and events is None:
        raise ValueError(
            f"{path} must hold the samples of an evaluation (a folder `samples` with {FACTS}) or TensorBoard's event "
            "files, but it holds neither. Run `grail-lightning test`, which keeps samples, or name another folder."
        )
    config = _read_object(trained / "config.yaml") or _read_object(folder / "config.yaml")
    for other in sorted(folder.glob("config_*.yaml"), key=lambda file: file.stat().st_mtime):
        config = config or _read_object(other)
    sweep = _read_object(trained / "sweep.json") or _read_object(folder / "sweep.json")
    return Run(
        given=argument,
        name=name,
        folder=folder,
        events=events,
        samples=samples,
        facts=facts,
        sweep=sweep,
        config=config,
    )


def _trained_in(folder: Path, model: Mapping[str, Any]) -> Path:
    """The folder of the run that trained the evaluated policy: that of its checkpoint or of its export."""
    for file in (model.get("checkpoint"), model.get("policy")):
        if isinstance(file, str) and Path(file).exists():
            for above in Path(file).resolve().parents[:2]:
                if (above / "config.yaml").is_file():
                    return above
    return folder


def _read_object(file: Path) -> dict[str, Any]:
    """The content of a file of YAML or JSON; empty without the file."""
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or (file.name == "sweep.json" and "method" not in content):
            raise ValueError(f"{content!r:.60}")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{file} must be what a run or a sweep left, but got: {error}. Restore or remove it."
        ) from None
    return content


def with_methods(runs: Sequence[Run]) -> list[Run]:
    """The runs with the names of their methods and tasks; runs of one method are neighbours, in the order of seeds.

    Runs belong to one method if the user gave them the same name; else if a sweep says so; else if their configs differ
    in nothing but the seed and the places of files. Tasks of a sweep are apart; runs of one task are together with runs
    of no task, if there are some.
    """
    tasks = dict.fromkeys(str(run.sweep.get("task", "")) for run in runs)
    if "" in tasks and len(tasks) > 2:
        raise ValueError(
            "Runs are compared within a task of a sweep, but some belong to none, and others to "
            f"{', '.join(filter(None, tasks))}. Report the runs of no task beside those of one task."
        )
    if len({bool(run.sweep.get("choosing")) for run in runs if run.sweep}) > 1:
        raise ValueError(
            "Runs that chose a point of a grid must not be reported beside others, which would flatter the point, but "
            "both are given. Report them apart."
        )
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        task = "" if "" in tasks else str(run.sweep.get("task", ""))
        groups[task, _key(run)].append(run)
    points = Counter((task, of[0].sweep["method"]) for (task, _), of in groups.items() if of[0].sweep)
    grouped: list[Run] = []
    for (task, _), members in groups.items():
        alone = points[task, members[0].sweep.get("method")] == 1
        name, number = _name(members, alone), 2
        method, taken = name, {run.method for run in grouped if run.task == task}
        while method in taken:
            method, number = f"{name} ({number})", number + 1
        members.sort(key=lambda run: (run.seed is None, run.seed or 0))
        for one, two in pairwise(members):
            if one.seed == two.seed:
                raise ValueError(
                    f"Runs of one method must have different seeds, but {one.given} and {two.given} (method "
                    f"{method!r}) both have {one.seed}. Leave one out, or name them as methods: NAME={two.given}."
                )
        grouped += [replace(run, method=method, task=task) for run in members]
    return grouped


def _key(run: Run) -> str:
    """What the runs of one method have in common."""
    if run.name:
        return f"name {run.name}"
    if run.sweep:
        return json.dumps([run.sweep["method"], run.sweep.get("point")], sort_keys=True, default=str)
    if not run.config:
        return f"folder {run.folder.resolve()}"
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in run.config.items()}
    for option in _INCIDENTAL:
        above, _, name = option.rpartition(".")
        tree = config.get(above) if above else config
        if isinstance(tree, dict):
            tree.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _name(members: Sequence[Run], alone: bool) -> str:
    """What the user or a sweep says; else what the names of the folders have in common."""
    first = members[0]
    if first.name:
        return first.name
    if first.sweep:
        return str(first.sweep["method"]) + ("" if alone or not first.point else f", {first.point}")
    names = [run.folder.resolve().name for run in members]
    if len(names) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    common = "".join(letters[0] for letters in same).rstrip("0123456789").rstrip("_-. ")
    return common.removesuffix("seed").rstrip("_-. ") or names[0]


def paired_seeds(ours: Sequence[int | None], theirs: Sequence[int | None]) -> list[tuple[int, int]]:
    """The places of the seeds that two methods have in common; none if they cannot be paired.

    They can if at least two are in common, or if one of the methods has a single seed and the other one has it, too.
    """
    common = [seed for seed in ours if seed in theirs]
    if None in ours or None in theirs or len(common) < min(2, len(ours), len(theirs)):
        return []
    return [(ours.index(seed), theirs.index(seed)) for seed in common]


def check_comparable(runs: Sequence[Run], *, common: bool) -> None:
    """Refuse runs that were evaluated with other settings, or on other problems unless only `common` ones count."""
    for run in runs[1:]:
        one, two = _settings(runs[0].facts, common), _settings(run.facts, common)
        names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        if common:  # Of datasets that only one has nothing is compared.
            names = [name for name in names if not name.startswith("grading") or (name in one and name in two)]
        if names:
            remedy = ", or compare the problems that all runs have: --common" if names[0].startswith("prob") else ""
            differ = "; ".join(f"`{name}` ({one.get(name)!r:.100}, {two.get(name)!r:.100})" for name in names)
            raise ValueError(
                f"Runs can be compared only on the same problems with the same settings, but {runs[0].samples} and "
                f"{run.samples} differ in {differ}. Test them with the same config{remedy}."
            )


def _settings(facts: Mapping[str, Any], common: bool) -> dict[str, Any]:
    """What must be the same in two evaluations, by name."""
    settings = {"num_samples": facts["num_samples"]}
    settings |= {f"sampling.{name}": value for name, value in (facts.get("sampling") or {}).items()}
    settings |= {f"grading of {name}": value for name, value in (facts.get("grading") or {}).items()}
    if not common:
        for name, about in facts["datasets"].items():
            settings[f"problems of {name}"] = f"{about['problems']} problems, digest {about['digest']}"
    return settings


def read_problems(runs: Sequence[Run], *, common: bool, votes: bool) -> pd.DataFrame:
    """The problems of runs that have samples: a row for each run and problem.

    The columns are ``method``, ``seed`` (the number of the run in its method), ``dataset``, ``identity``, ``number``
    (among equal problems) and ``problem``, a `Problem`. Every run has the same problems.
    """
    rows, of_method = [], Counter[str]()
    for run in runs:
        assert run.samples is not None
        counts, equal = Counter[str](), Counter[tuple[str, str]]()
        for identity, problem in _whole_problems(run, votes=votes):
            place = problem.dataset, identity
            rows.append((run.method, of_method[run.method], *place, equal[place], problem))
            counts[problem.dataset] += 1
            equal[place] += 1
        of_method[run.method] += 1
        for dataset, about in run.facts["datasets"].items():
            if counts[dataset] != about["problems"] and not common:
                raise ValueError(
                    f"{run.samples} must hold all {about['problems']} problems of {dataset or 'its data'} with "
                    f"{run.facts['num_samples']} samples each, but it holds {counts[dataset]}. Run the same `test` "
                    "again, which continues it, or compare the problems that all runs have: --common."
                )
    frame = pd.DataFrame(rows, columns=["method", "seed", "dataset", "identity", "number", "problem"])
    shared = frame.groupby(["dataset", "identity", "number"])["problem"].transform("size") == len(runs)
    if not shared.any():
        raise ValueError("The runs must have problems in common, but there is none. Test them on the same data.")
    return frame[shared]


def _whole_problems(run: Run, *, votes: bool) -> list[tuple[str, Problem]]:
    """The identity and the verdicts of every problem that has all its samples, in the order of the data."""
    assert run.samples is not None
    places: dict[tuple[str, int], dict[int, Sample]] = defaultdict(dict)
    for sample in read_samples(run.samples):
        kept = sample if votes else replace(sample, prediction=None)  # Grouping equal answers takes long.
        places[sample.dataset, sample.index].setdefault(sample.sample, kept)
    grading, problems = run.facts.get("grading") or {}, []
    for (dataset, _), samples in sorted(places.items()):
        if samples.keys() == set(range(run.facts["num_samples"])):
            compare = grading.get(dataset, {}).get("compare", "math")
            (problem,) = problems_of((samples[k] for k in sorted(samples)), compare)
            problems.append((samples[0].problem, problem))
    return problems


def compare(
    runs: Sequence[Run], baseline: str, pass_at: Sequence[int], maj_at: Sequence[int], *, common: bool = False
) -> pd.DataFrame:
    """The figures of methods with intervals, and of acc@n, pass@k and maj@k the differences from a baseline.

    Args:
        runs: The runs, with methods (`with_methods`) and samples.
        baseline: The name of one of the methods.
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k.
        common: Whether only the problems are compared that all runs have.
    """
    check_comparable(runs, common=common)
    frame = read_problems(runs, common=common, votes=bool(maj_at))
    seeds: dict[str, list[int | None]] = defaultdict(list)
    for run in runs:
        seeds[run.method].append(run.seed)
    sizes = {name: int((frame["dataset"] == name).sum()) // len(runs) for name in frame["dataset"].unique()}
    about = runs[0].facts["datasets"]
    parts = [(_label(name, size, about[name]), [name], [1.0]) for name, size in sizes.items()]
    if len(sizes) > 1:
        ways = [[1 / len(sizes)] * len(sizes), [size / sum(sizes.values()) for size in sizes.values()]]
        parts += [(label, list(sizes), weights) for label, weights in zip(AVERAGES, ways, strict=True)]
    limit = float((runs[0].facts.get("sampling") or {}).get("max_response_length") or 1 << 20)
    rows: list[dict[str, Any]] = []
    for figure, (values, noise) in _figures(list(frame["problem"]), pass_at, maj_at, limit).items():
        key, columns = ["dataset", "identity", "number"], ["method", "seed"]
        tables = frame.assign(values=values, noise=noise).pivot(index=key, columns=columns, values=["values", "noise"])
        tested = baseline if figure[:3] in ("acc", "pas", "maj") else None
        for label, datasets, weights in parts:
            part = "average" if label in AVERAGES and len(sizes) > 1 else "dataset"
            known = {
                "part": part,
                "dataset": label,
                "figure": figure,
                "problems": sum(sizes[name] for name in datasets),
            }
            shares = {name: _shares(tables, datasets, name) for name in seeds}
            scale = limit if figure == "tokens" else 1.0
            rows += [known | row for row in _compared(shares, seeds, weights, tested, scale)]
    return with_corrected(pd.DataFrame(rows))


def _label(name: str, size: int, about: Mapping[str, Any]) -> str:
    """The name of a dataset, and which part of it was evaluated."""
    parts = [f"first {about['first']}"] if about.get("first") is not None else []
    parts += [f"{size} in common"] if size != about["problems"] else []
    return (name or "all") + (f" ({', '.join(parts)})" if parts else "")


def _figures(
    problems: Sequence[Problem], pass_at: Sequence[int], maj_at: Sequence[int], limit: float
) -> dict[str, Any]:
    """Each figure of each problem ``[N]``, and its variance over other samples of the problem ``[N]``, by name."""
    correct = torch.tensor([problem.correct for problem in problems])
    number, right = correct.shape[1], correct.sum(1)
    names = {f"acc@{number}": 1} | {f"pass@{k}": k for k in pass_at}
    figures: dict[str, Any] = {
        name: (pass_at_k(number, right, k).numpy(), pass_at_k_variance(number, right, k).numpy())
        for name, k in names.items()
    }
    for k in maj_at:
        share = np.array([maj_at_k(problem.votes, problem.correct, k) for problem in problems], dtype=float)
        figures[f"maj@{k}"] = share, vote_noise(share, number, k)
    # Lengths are shares of the limit, so that they have the interval of a share.
    described = {"tokens": np.array([problem.lengths for problem in problems]) / limit}
    described["truncated"] = ~np.array([problem.finished for problem in problems])
    described["no answer"] = np.array([problem.statuses for problem in problems]) == "missing"
    return figures | {name: (of.mean(1), of.astype(float).var(1) / number) for name, of in described.items()}


def _shares(tables: pd.DataFrame, datasets: Sequence[str], method: str) -> list[Share]:
    """A figure of a method on each dataset."""
    parts = [tables.loc[name] for name in datasets]
    return [(part["values"][method].to_numpy(float), part["noise"][method].to_numpy(float)) for part in parts]


def _compared(
    shares: Mapping[str, Sequence[Share]],
    seeds: Mapping[str, Sequence[int | None]],
    weights: Sequence[float],
    baseline: str | None,
    scale: float,
) -> list[dict[str, Any]]:
    """One row for each method: its figure, and its difference from the baseline if there is one."""
    rows = []
    for method, ours in shares.items():
        result = estimate([values for values, _ in ours], [noise for _, noise in ours], weights)
        row = {"method": method, "seeds": len(seeds[method]), "value": result.value * scale}
        row |= {"low": result.low * scale, "high": result.high * scale, "tested": None, "paired_seeds": math.nan}
        if baseline not in (None, method):
            theirs = shares[str(baseline)]
            if places := paired_seeds(seeds[method], seeds[str(baseline)]):
                mine, other = (list(kept) for kept in zip(*places, strict=True))
                ours = [(values[:, mine], noise[:, mine]) for values, noise in ours]
                theirs = [(values[:, other], noise[:, other]) for values, noise in theirs]
                row["paired_seeds"] = len(places)
            noises = [(one, two) for (_, one), (_, two) in zip(ours, theirs, strict=True)]
            tables, base = ([values for values, _ in of] for of in (ours, theirs))
            row |= {"baseline": baseline, "tested": difference(tables, base, noises, weights, bool(places))}
        rows.append(row)
    return rows


def with_corrected(frame: pd.DataFrame) -> pd.DataFrame:
    """The figures with their differences, p-values corrected for the number of comparisons, and what could be shown.

    The datasets of a figure (times methods) are one family; each average is a family of its own.
    """
    family = frame["figure"] + frame["dataset"].where(frame["part"] == "average", "")
    for _, rows in frame[frame["tested"].notna()].groupby(family):
        corrected = holm([tested.p_value for tested in rows["tested"]])
        for place, tested, p_value in zip(rows.index, rows["tested"], corrected, strict=True):
            # Seeds that differ all alike tell nothing of what could be shown.
            least = math.nan if math.isnan(tested.low) else tested.detectable(len(rows))
            cells = (tested.value, tested.low, tested.high, tested.p_value, p_value, least)
            frame.loc[place, ["difference", "difference_low", "difference_high", "p", "p_holm", "detectable"]] = cells
    return frame.drop(columns="tested")
