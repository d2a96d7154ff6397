"""Kept samples as arrays, and whether those of several runs can be compared.

Shapes: ``N`` problems, ``n`` samples of each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grail_lightning.evaluation.problems import problems_of
from grail_lightning.evaluation.records import Sample, read_samples
from grail_lightning.report.runs import EvaluatedRun, mapping
from grail_lightning.tasks.base import Comparison


class Key(NamedTuple):
    """A problem of a dataset: its identity, and its number among equal problems."""

    problem: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Responses:
    """The samples of some problems of one run and dataset.

    Attributes:
        keys: The problems.
        correct: ``[N, n]`` bool.
        lengths: ``[N, n]`` int, generated tokens.
        finished: ``[N, n]`` bool, whether a response ended by itself.
        missing: ``[N, n]`` bool, whether a response has no answer.
        votes: ``[N, n]`` int, equal numbers for equal answers of a problem, -1 without one; ``[N, 0]`` if they were
            not asked for.
    """

    keys: list[Key]
    correct: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    missing: NDArray[np.bool_]
    votes: NDArray[np.int64]

    def only(self, keys: Sequence[Key]) -> Responses:
        """These problems, in this order."""
        place = {key: row for row, key in enumerate(self.keys)}
        rows = [place[key] for key in keys]
        return Responses(
            keys=list(keys),
            correct=self.correct[rows],
            lengths=self.lengths[rows],
            finished=self.finished[rows],
            missing=self.missing[rows],
            votes=self.votes[rows],
        )


def read_responses(run: EvaluatedRun, *, complete: bool, votes: bool = False) -> dict[str, Responses]:
    """The responses of a run, by dataset, with the problems that have all their samples.

    Args:
        run: The run.
        complete: Whether every problem must have all its samples.
        votes: Whether to group equal answers, for majority votes. It compares them as the task does.

    Raises:
        ValueError: If the files are damaged, or not complete although they must be.
    """
    rows: dict[tuple[str, int], dict[int, Sample]] = defaultdict(dict)
    for sample in read_samples(run.samples):
        rows[sample.dataset, sample.index].setdefault(sample.sample, sample)
    wanted = int(run.facts["num_samples"])
    whole = {place: found for place, found in rows.items() if found.keys() == set(range(wanted))}
    found: dict[str, Responses] = {}
    for dataset, about in run.facts["datasets"].items():
        problems = [whole[place] for place in sorted(place for place in whole if place[0] == dataset)]
        if complete and len(problems) != about["problems"]:
            raise ValueError(
                f"{run.samples} must hold all {about['problems']} problems of {dataset or 'its data'} with {wanted} "
                f"samples each, but it holds {len(problems)}. Run the same `test` again, which continues it, or "
                "compare the problems that all runs have: --common."
            )
        how = mapping(mapping(run.facts.get("grading")).get(dataset)).get("compare", "math")
        unasked = np.empty((len(problems), 0), dtype=np.int64)
        found[dataset] = _arrays(problems, wanted, _votes(problems, wanted, how) if votes else unasked)
    return found


def _votes(problems: Sequence[Mapping[int, Sample]], wanted: int, compare: Comparison) -> NDArray[np.int64]:
    found = [problems_of((samples[k] for k in range(wanted)), compare)[0].votes for samples in problems]
    return np.array(found, dtype=np.int64).reshape(len(problems), wanted)


def _arrays(problems: Sequence[Mapping[int, Sample]], wanted: int, votes: NDArray[np.int64]) -> Responses:
    seen: Counter[str] = Counter()
    keys = []
    for samples in problems:
        keys.append(Key(samples[0].problem, seen[samples[0].problem]))
        seen[samples[0].problem] += 1

    def table(of: str) -> NDArray[Any]:
        values = [[getattr(samples[k], of) for k in range(wanted)] for samples in problems]
        return np.array(values).reshape(len(problems), wanted)

    return Responses(
        keys=keys,
        correct=table("correct").astype(bool),
        lengths=table("num_tokens").astype(np.int64),
        finished=table("finished").astype(bool),
        missing=table("status") == "missing",
        votes=votes,
    )


def check_comparable(runs: Sequence[EvaluatedRun], *, common: bool) -> None:
    """Refuse runs that were evaluated on other problems or with other settings.

    Args:
        runs: The runs.
        common: Whether only the problems that all runs have are compared; the settings must be the same all the same.

    Raises:
        ValueError: If two runs differ; the message says in what.
    """
    for run in runs[1:]:
        found = _settings_that_differ(runs[0].facts, run.facts)
        problems = [] if common else _problems_that_differ(runs[0].facts["datasets"], run.facts["datasets"])
        if found or problems:
            remedy = "" if found else ", or compare the problems that all runs have: --common"
            raise ValueError(
                f"Runs can be compared only on the same problems with the same settings, but {runs[0].samples} "
                f"and {run.samples} differ in {'; '.join(found + problems)}. Test them with the same config{remedy}."
            )


def _settings_that_differ(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Sampling, the number of samples, and the grading of the datasets that both have."""
    pairs = {"num_samples": (one["num_samples"], two["num_samples"])}
    first, second = mapping(one.get("sampling")), mapping(two.get("sampling"))
    pairs |= {f"sampling.{name}": (first.get(name), second.get(name)) for name in [*first, *second]}
    first, second = mapping(one.get("grading")), mapping(two.get("grading"))
    pairs |= {f"grading of {name}": _differing(first[name], second[name]) for name in first if name in second}
    return [f"`{name}` ({a!r:.100}, {b!r:.100})" for name, (a, b) in pairs.items() if a != b]


def _differing(one: object, two: object) -> tuple[object, object]:
    """Two mappings without what they have in common; anything else as it is."""
    if not (isinstance(one, dict) and isinstance(two, dict)):
        return one, two
    names = [name for name in {**one, **two} if name not in one or name not in two or one[name] != two[name]]
    first, second = ({name: of[name] for name in names if name in of} for of in (one, two))
    return first, second


def _problems_that_differ(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """The datasets of which the problems are not the same, with their numbers."""
    return [
        f"the problems of {name or 'the data'} ({_number(one.get(name))} and other {_number(two.get(name))})"
        for name in dict.fromkeys([*one, *two])
        if mapping(one.get(name)).get("digest") != mapping(two.get(name)).get("digest")
    ]


def _number(about: Mapping[str, Any] | None) -> str:
    if about is None:
        return "none"
    return f"{about['problems']}" + (f", the first {about['first']} rows" if about.get("first") else "")


def common_problems(responses: Sequence[Mapping[str, Responses]]) -> dict[str, list[Key]]:
    """The problems of each dataset that all runs have, in the order of the first run.

    Args:
        responses: What `read_responses` gives for each run.

    Raises:
        ValueError: If there is none.
    """
    found: dict[str, list[Key]] = {}
    for dataset, first in responses[0].items():
        others = [set(run[dataset].keys) if dataset in run else set() for run in responses[1:]]
        keys = [key for key in first.keys if all(key in other for other in others)]
        if keys:
            found[dataset] = keys
    if not found:
        raise ValueError("The runs must have problems in common, but there is none. Test them on the same data.")
    return found
