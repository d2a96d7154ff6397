"""The files of an evaluation: what was evaluated, and one line for each sample.

A folder ``samples`` holds ``evaluation.json`` and, for each rank, ``rank_00000.jsonl`` with one JSON object a line, in
the order in which the batches ended. Lines are only ever appended and are on the disk before the next batch begins, so
a process that is killed leaves whole lines and at most one torn last one, which readers leave out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grail_lightning.answers.judge import answer_classes, text_classes
from grail_lightning.answers.records import UNSCORED, WITHOUT_VOTE
from grail_lightning.core.records.columns import COLUMNS, SAMPLE, Row, append_lines, line_of, read_rows
from grail_lightning.core.records.task import Comparison
from grail_lightning.core.runtime.files import write_whole

FORMAT = 2
FACTS = "evaluation.json"
_FILES = "rank_*.jsonl"
# What may change between an interruption and its continuation: the digests say which weights and problems these are.
_INCIDENTAL = re.compile(r"finished|created|table(\..*)?|model\.(policy|checkpoint|step)|datasets\..*\.source")


_PROBLEM = ["dataset", "index"]
# The columns of a frame of samples.
_FRAME = (
    *("dataset", "index", "sample", "problem", "columns", "correct", "status", "num_tokens", "finished"),
    *("prediction", "reward"),
)


def sample_frame(samples: Iterable[Row], num_samples: int) -> pd.DataFrame:
    """A row for each sample of the problems that have all of them, in the order of dataset, problem and sample.

    Of a sample that is there twice the first one counts.
    """
    kinds = {name: COLUMNS[name].kind for name in _FRAME}
    types = {
        name: "int64" if kind.startswith("int") else kind if kind in ("bool", "float64") else "object"
        for name, kind in kinds.items()
    }
    rows = [[sample[name] for name in _FRAME] for sample in samples]
    frame = pd.DataFrame(rows, columns=list(_FRAME), dtype=object).astype(types)
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
    remedy = "Give the folder that a test left, such as runs/quickstart/test/samples, or move this one away."
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["format"] == FORMAT and {"datasets", "num_samples"} <= facts.keys():
            return dict(facts)
        got = "other entries"
        if facts["format"] != FORMAT:
            got = f"the format {facts['format']!r:.20} of another version"
            remedy = "Move the folder away: `test` makes new samples, and a report shows the run's curves without them."
    except (OSError, ValueError, TypeError, KeyError) as error:
        got = repr(error)
    raise ValueError(
        f"{folder} must be a folder of samples with an {FACTS} of the `format` {FORMAT}, but got {got}. {remedy}"
    )


def write_evaluation(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``evaluation.json``, which is there as a whole or not at all."""
    write_whole(folder / FACTS, json.dumps(facts, indent=2) + "\n")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted names in which two evaluations differ, so that their samples must not be mixed."""
    first, second = (dict(flat(json.loads(json.dumps(tree)))) for tree in (before, now))
    return [name for name in unequal(first, second) if not _INCIDENTAL.fullmatch(name)]


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


def read_samples(folder: Path) -> Iterator[Row]:
    """The samples of a folder, file by file, in the order in which they were written, as `read_rows` reads them."""
    for file in sorted(folder.glob(_FILES)):
        yield from read_rows(file, SAMPLE)


def append_samples(folder: Path, rank: int, samples: Iterable[Row]) -> None:
    """Append samples to the file of a rank, in a folder that exists; they are on the disk when this returns."""
    append_lines(folder / f"rank_{rank:05d}.jsonl", samples)


def prune(folder: Path, keep: Callable[[Row], bool]) -> None:
    """Remove torn lines, samples that are there twice, and those that `keep` refuses.

    Each file is replaced as a whole, and only if its content changes.
    """
    seen: set[tuple[str, int, int]] = set()
    for file in sorted(folder.glob(_FILES)):
        lines = list[bytes]()
        for sample in read_rows(file, SAMPLE):
            place = sample["dataset"], sample["index"], sample["sample"]
            if place not in seen and keep(sample):
                lines.append(line_of(sample))
                seen.add(place)
        if (content := b"".join(lines)) != file.read_bytes():
            write_whole(file, content.decode())
