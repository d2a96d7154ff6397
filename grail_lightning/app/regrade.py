"""``python -m grail_lightning.regrade RUN``: kept samples graded again, without sampling.

After a change of the verifier, or to see what it decided.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from grail_lightning import answers
from grail_lightning.answers.find import AnswerForm
from grail_lightning.answers.verifier import Verifier
from grail_lightning.app.cli.help import refuse
from grail_lightning.app.results.records import (
    append_samples,
    read_evaluation,
    read_samples,
    sample_frame,
    with_votes,
    write_evaluation,
)
from grail_lightning.app.results.table import TableOptions, evaluation_table
from grail_lightning.core.records.columns import Row
from grail_lightning.core.rollout.grading import GivenAnswer, compare_answers

_OUR_FORMS = "grail_lightning.answers.find"  # or a module below it, in the samples of older versions


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A user's mistake is one line, with exit code 2."""
    description = "Grade kept samples again, without sampling."
    parser = argparse.ArgumentParser("python -m grail_lightning.regrade", description=description, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="the folder of a run that was tested, or a folder `samples`")
    parser.add_argument("--output", type=Path, help="a new folder for the samples with their new verdicts")
    options = parser.parse_args(arguments)
    try:
        _regrade(options.folder, options.output)
    except (ValueError, OSError) as error:
        refuse(str(error))


def _regrade(folder: Path, output: Path | None) -> None:
    """Grade the kept samples of a run again, print what has changed and the table, and write them to a new folder."""
    inside = (folder / part for part in ("samples", "test/samples"))
    folder = next((part for part in inside if part.is_dir()), folder)
    facts = read_evaluation(folder)
    if output is not None and output.exists():
        raise ValueError(f"`--output` must be a new folder, but {output} exists. Give another, or remove it.")
    before = sorted(read_samples(folder), key=lambda sample: (sample["dataset"], sample["index"], sample["sample"]))
    with Verifier() as verifier:
        after = regraded(before, facts, verifier)
    pairs = zip(before, after, strict=True)
    verdict = itemgetter("status", "prediction")
    changed = [(old, new) for old, new in pairs if verdict(old) != verdict(new)]
    print(f"{len(before)} samples of {folder}, {len(changed)} with another verdict")
    for old, new in changed:
        print(
            f"{old['dataset']} problem {old['index']} sample {old['sample']}: {old['status']} ({old['layer']}) -> "
            f"{new['status']} ({new['layer']}); reference {new['reference']!a:.80}, answer {new['prediction']!a:.80}"
        )
    gradings, whole = facts.get("grading", {}), sample_frame(after, facts["num_samples"])
    if facts.get("finished") is None:
        wanted = sum(about["problems"] for about in facts["datasets"].values())
        done = len(whole) // facts["num_samples"]
        print(f"The evaluation was interrupted: {done} of {wanted} problems.")
    if len(whole):
        first = {name: about["first"] for name, about in facts["datasets"].items() if about["first"] is not None}
        voted = with_votes(whole, {name: grading.get("compare", "math") for name, grading in gradings.items()})
        print(f"\n{evaluation_table(voted, TableOptions(**facts.get('table', {}), first=first))}")
    if output is not None:
        output.mkdir(parents=True)
        write_evaluation(output, facts | {"regraded": datetime.now().astimezone().isoformat(timespec="seconds")})
        append_samples(output, 0, after)
        print(f"\nThe samples with their new verdicts are in {output}.")


def regraded(samples: Sequence[Row], facts: Mapping[str, Any], verifier: Verifier) -> list[Row]:
    """The samples with new verdicts; `facts` are what they belong to (`read_evaluation`).

    The answer is read from the response again if its form is one of this package's (`Boxed`, `LastNumber`, `Marker`,
    `Pattern`); a task with a form of its own keeps the prediction that it read. The reference is the one that was kept.
    What an environment judged stays, and so do its rollouts without an answer: a turn that calls a tool has none.
    """
    gradings = {name: {"compare": "math", **grading} for name, grading in facts.get("grading", {}).items()}
    for name, grading in gradings.items():
        if grader := "the task itself" if grading.get("own_verdicts") else grading.get("verifier"):
            raise ValueError(
                f"`regrade` compares answers by the usual conventions, but those of {name or 'the data'} were compared "
                f"by {grader}. Run `test` again."
            )
    forms = {name: _form(**grading.get("answer", {})) for name, grading in gradings.items()}
    evaluated = {name for name, grading in gradings.items() if grading.get("answer", {}).get("evaluated")}
    rows = []
    for sample in samples:
        dataset = sample["dataset"]
        form, how = forms.get(dataset), gradings.get(dataset, {}).get("compare", "math")
        answer = sample["prediction"] if form is None else form.last(sample["response"])
        rows.append(GivenAnswer(sample["reference"], answer, how, dataset in evaluated))
    new = []
    for sample, verdict in zip(samples, compare_answers(rows, verifier), strict=True):
        judged = sample["end"] is not None and (sample["status"] == "missing" or not sample["reference"])
        if judged or sample["status"] == "unknown_tokens":
            new.append(sample)  # Judged by its environment, without an answer, or for tokens that its text lacks.
            continue
        prediction = None if verdict.status == "missing" else verdict.prediction
        decided = {"correct": verdict.correct, "status": verdict.status, "layer": verdict.layer}
        new.append(sample | {"prediction": prediction} | decided)
    return new


def _form(**options: Any) -> AnswerForm | None:
    """The form of the answers; None for one that is not of this package."""
    module, _, name = str(options.pop("class", "")).rpartition(".")
    form: AnswerForm | None = getattr(answers, name)(**options) if module.startswith(_OUR_FORMS) else None
    return form
