"""The files of an evaluation: what was evaluated, and one line for each sample.

A folder ``samples`` holds ``evaluation.json`` and, for each rank, ``rank_00000.jsonl`` with one JSON object a line, in
the order in which the batches ended. Lines are only ever appended and are on the disk before the next batch begins, so
a process that is killed leaves whole lines and at most one torn last one, which readers leave out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grail_lightning.answers import answer_classes, text_classes
from grail_lightning.answers.records import UNSCORED, WITHOUT_VOTE
from grail_lightning.runtime.files import write_whole
from grail_lightning.tasks.base import Comparison

FORMAT = 1
FACTS = "evaluation.json"
_FILES = "rank_*.jsonl"
# What may change between an interruption and its continuation: the digests say which weights and problems these are.
_INCIDENTAL = re.compile(r"finished|created|table(\..*)?|model\.(policy|checkpoint|step)|datasets\..*\.source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response to one problem, with its verdict: a line of a file."""

    dataset: str
    problem: str  # `problem_id`: the same wherever the same problem is asked in the same words.
    index: int  # The place of the problem in the dataset, from 0.
    sample: int  # The number of the response, from 0 to ``n - 1``.
    prompt: str  # As people read it.
    reference: str
    response: str  # Without special tokens.
    prediction: str | None  # The answer that was graded; None if the response has none.
    correct: bool  # Whether the verdict is `right`.
    status: str  # The verdict.
    layer: str  # The layer of the verifier that decided.
    num_tokens: int  # The end token included.
    finished: bool  # Whether the response ended by itself within the limit.
    seed: int  # Of the response's random numbers.
    columns: dict[str, Any] = field(default_factory=dict)  # Short further ones of the row: `subject`, `level`.
    # At the time of sampling: `regrade` keeps it. A response that nothing scored has none, nor have older files.
    reward: float | None = None
    # Of a rollout in an environment; the lines of others do not have them.
    num_turns: int | None = None
    num_calls: int | None = None
    num_invalid_calls: int | None = None  # Calls that could not be read, name no tool, or have wrong arguments.
    end: str | None = None  # Why it ended: answered, turns, tokens, context, failures.
    transcript: str | None = None  # What the policy wrote and what it was told.


_PROBLEM = ["dataset", "index"]
# The columns of a frame of samples, with their types.
_FRAME = {"dataset": "object", "index": "int64", "sample": "int64", "problem": "object", "columns": "object"}
_FRAME |= {"correct": "bool", "status": "object", "num_tokens": "int64", "finished": "bool", "prediction": "object"}
_FRAME |= {"reward": "float64"}


def sample_frame(samples: Iterable[Sample], num_samples: int) -> pd.DataFrame:
    """A row for each sample of the problems that have all of them, in the order of dataset, problem and sample.

    Of a sample that is there twice the first one counts.
    """
    rows = [[getattr(sample, name) for name in _FRAME] for sample in samples]
    frame = pd.DataFrame(rows, columns=list(_FRAME), dtype=object).astype(_FRAME)
    frame = frame.drop_duplicates([*_PROBLEM, "sample"]).sort_values([*_PROBLEM, "sample"])
    whole = frame.groupby(_PROBLEM)["sample"].transform("size") == num_samples
    return frame[whole].reset_index(drop=True)


def with_votes(frame: pd.DataFrame, compare: Mapping[str, Comparison]) -> pd.DataFrame:
    """The samples with the column ``vote``: equal numbers for equal answers to a problem, -1 without an answer.

    Answers are equal as the task of a dataset compares them; `compare` says how, by dataset. What has a status
    of `WITHOUT_VOTE` has none: an answer that is not worked out, for one, is equal to an answer that is right.
    """
    votes = list[int]()
    counted = frame["prediction"].mask(frame["status"].isin(WITHOUT_VOTE), other=None)
    for (dataset, _), predictions in frame.assign(prediction=counted).groupby(_PROBLEM, sort=False)["prediction"]:
        if (how := compare.get(dataset, "math")) == "math":
            votes += answer_classes(list(predictions))
        else:
            votes += text_classes(list(predictions), ignore_case=how != "exact")
    return frame.assign(vote=np.array(votes, dtype=int))


def judged(frame: pd.DataFrame) -> pd.DataFrame:
    """The samples of the problems whose samples are all right or wrong: an `unscored` one leaves its problem out."""
    unscored = frame["status"] == UNSCORED
    if not unscored.any():
        return frame
    return frame[~unscored.groupby([frame[name] for name in _PROBLEM]).transform("any")]


def set_digest(problems: Sequence[str]) -> str:
    """The identity of a set of problems, in any order: a hash of their sorted identities."""
    return hashlib.blake2b("\n".join(sorted(problems)).encode(), digest_size=16).hexdigest()


def read_evaluation(folder: Path) -> dict[str, Any]:
    """What the samples of a folder belong to: the content of its ``evaluation.json``, or a ValueError."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["format"] == FORMAT and {"datasets", "num_samples"} <= facts.keys():
            return dict(facts)
        got = "other entries"
    except (OSError, ValueError, TypeError, KeyError) as error:
        got = repr(error)
    raise ValueError(
        f"{folder} must be a folder of samples with an {FACTS} of the `format` {FORMAT}, such as "
        f"runs/quickstart/test/samples, but got {got}. Give the folder that a test left, or move a damaged one away."
    )


def write_evaluation(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``evaluation.json``, which is there as a whole or not at all."""
    write_whole(folder / FACTS, json.dumps(facts, indent=2) + "\n")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted names in which two evaluations differ, so that their samples must not be mixed."""
    one, two = (dict(flat(json.loads(json.dumps(tree)))) for tree in (before, now))
    return [name for name in unequal(one, two) if not _INCIDENTAL.fullmatch(name)]


def unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, str]:
    """The names, in their order, under which two mappings hold other values or one holds none, with both values."""
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return {name: f"`{name}` ({one.get(name)!r:.100}, {two.get(name)!r:.100})" for name in names}


def flat(tree: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values as dotted names and values; an empty mapping inside is a value."""
    if not isinstance(tree, dict) or (name and not tree):
        yield name, tree
        return
    for key, value in tree.items():
        yield from flat(value, f"{name}.{key}" if name else str(key))


def read_samples(folder: Path) -> Iterator[Sample]:
    """The samples of a folder, file by file, in the order in which they were written.

    A torn last line, which a process that was killed may leave, is left out; another line that is no sample is a
    ValueError with file and line.
    """
    for file in sorted(folder.glob(_FILES)):
        yield from _read(file)


def append_samples(folder: Path, rank: int, samples: Iterable[Sample]) -> None:
    """Append samples to the file of a rank, in a folder that exists; they are on the disk when this returns."""
    with (folder / f"rank_{rank:05d}.jsonl").open("ab") as file:
        file.writelines(map(_line, samples))
        file.flush()
        os.fsync(file.fileno())


def prune(folder: Path, keep: Callable[[Sample], bool]) -> None:
    """Remove torn lines, samples that are there twice, and those that `keep` refuses.

    Each file is replaced as a whole, and only if its content changes.
    """
    seen: set[tuple[str, int, int]] = set()
    for file in sorted(folder.glob(_FILES)):
        lines = list[bytes]()
        for sample in _read(file):
            place = sample.dataset, sample.index, sample.sample
            if place not in seen and keep(sample):
                lines.append(_line(sample))
                seen.add(place)
        if (kept := b"".join(lines)) != file.read_bytes():
            write_whole(file, kept.decode())


def _line(sample: Sample) -> bytes:
    cells = dataclasses.asdict(sample).items()
    row = {name: value for name, value in cells if value is not None or name == "prediction"}
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _read(file: Path) -> Iterator[Sample]:
    """The samples of the whole lines of a file."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Sample(**json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise ValueError(
                    f"{file}, line {number}: expected a JSON object with the fields of a sample, but got "
                    f"{line[:60]!a}. Remove the line, or move the folder away."
                ) from None
