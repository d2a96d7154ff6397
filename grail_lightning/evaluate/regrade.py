"""Kept samples graded again, without sampling: after a change of the verifier, or to see what it decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from grail_lightning import answers
from grail_lightning.answers import AnswerForm, Verdict, Verifier
from grail_lightning.evaluate.records import (
    Problem,
    Sample,
    SampleWriter,
    problems_of,
    read_evaluation,
    read_samples,
    write_evaluation,
)
from grail_lightning.evaluate.table import TableOptions, evaluation_table

_OUR_FORMS = "grail_lightning.answers.find"  # or a module below it, in the samples of older versions
_SHOWN = 80


def regrade(folder: Path, output: Path | None = None) -> None:
    """Grade the kept samples of a run again, print what has changed and the table, and write them to a new folder."""
    inside = (folder / part for part in ("samples", "test/samples"))
    folder = next((part for part in inside if part.is_dir()), folder)
    facts = read_evaluation(folder)
    if output is not None and output.exists():
        raise ValueError(f"`--output` must be a new folder, but {output} exists. Give another, or remove it.")
    before = sorted(read_samples(folder), key=lambda sample: (sample.dataset, sample.index, sample.sample))
    with Verifier() as verifier:
        after = regraded(before, facts, verifier)
    pairs = zip(before, after, strict=True)
    changed = [(old, new) for old, new in pairs if (old.status, old.prediction) != (new.status, new.prediction)]
    print(f"{len(before)} samples of {folder}, {len(changed)} with another verdict")
    for old, new in changed:
        print(
            f"{old.dataset} problem {old.index} sample {old.sample}: {old.status} ({old.layer}) -> {new.status} "
            f"({new.layer}); reference {_short(new.reference)}, answer {_short(new.prediction)}"
        )
    problems, shown = table_of(after, facts)
    if facts.get("finished") is None:
        wanted = sum(found["problems"] for found in facts["datasets"].values())
        print(f"The evaluation was interrupted: {len(problems)} of {wanted} problems.")
    if problems:
        print(f"\n{evaluation_table(problems, shown)}")
    if output is not None:
        output.mkdir(parents=True)
        write_evaluation(output, facts | {"regraded": datetime.now().astimezone().isoformat(timespec="seconds")})
        writer = SampleWriter(output, 0)
        writer.write(after)
        writer.close()
        print(f"\nThe samples with their new verdicts are in {output}.")


def _short(text: str | None) -> str:
    """A text of a model's, so that it cannot steer a terminal."""
    shown = ascii(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"


def regraded(samples: Sequence[Sample], facts: Mapping[str, Any], verifier: Verifier) -> list[Sample]:
    """The samples with new verdicts.

    The answer is read from the response again if its form is one of this package's (`Boxed`, `LastNumber`, `Marker`,
    `Pattern`); a task with a form of its own keeps the prediction that it read. The reference is the one that was kept.

    Args:
        samples: The samples.
        facts: What they belong to (`read_evaluation`).
        verifier: The verifier that compares answers as formulas.
    """
    gradings = facts.get("grading", {})
    forms = {name: _form(grading) for name, grading in gradings.items()}
    compare = {name: grading["compare"] for name, grading in gradings.items()}
    found = []
    for sample in samples:
        form = forms.get(sample.dataset)
        found.append(sample.prediction if form is None else form.last(sample.response))
    pairs = [
        (sample.reference, answer)
        for sample, answer in zip(samples, found, strict=True)
        if answer is not None and compare.get(sample.dataset, "math") == "math"
    ]
    compared = iter(verifier.grade(pairs))
    new = []
    for sample, answer in zip(samples, found, strict=True):
        how = compare.get(sample.dataset, "math")
        if answer is None:
            verdict = Verdict.missing(sample.reference)
        elif how == "math":
            verdict = next(compared)
        else:
            verdict = Verdict.of_text(sample.reference, answer, ignore_case=how == "text")
        prediction = None if verdict.status == "missing" else answer
        new.append(
            replace(sample, prediction=prediction, correct=verdict.correct, status=verdict.status, layer=verdict.layer)
        )
    return new


def table_of(samples: Sequence[Sample], facts: Mapping[str, Any]) -> tuple[list[Problem], TableOptions]:
    """The problems that have all their samples, in the order of the data, and what a table of them shows."""
    ordered = sorted(samples, key=lambda sample: (sample.dataset, sample.index, sample.sample))
    problems: list[Problem] = []
    for name, rows in groupby(ordered, key=lambda sample: sample.dataset):
        problems += problems_of(rows, facts.get("grading", {}).get(name, {}).get("compare", "math"))
    whole = [problem for problem in problems if len(problem.correct) == facts["num_samples"]]
    first = {name: found["first"] for name, found in facts["datasets"].items() if found["first"] is not None}
    return whole, TableOptions(**facts.get("table", {}), first=first)


def _form(grading: Mapping[str, Any]) -> AnswerForm | None:
    """The form of the answers; None for one that is not of this package."""
    options = dict(grading.get("answer") or {})
    module, _, name = str(options.pop("class", "")).rpartition(".")
    if not module.startswith(_OUR_FORMS):
        return None
    form: AnswerForm = getattr(answers, name)(**options)
    return form
