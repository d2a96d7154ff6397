"""The report on a method: Markdown, one HTML page that needs no network, and the JSON that both are made of.

The texts of models and of users are untrusted: Jinja2 escapes them in the page, whose policy lets no program run and
nothing be fetched, and `markdown` escapes them in Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from grail_lightning.app.benchmark.claims import in_words, listed, sentence
from grail_lightning.app.benchmark.pictures import curves_pictures, forest_picture, rollouts, steps_table
from grail_lightning.app.benchmark.result import Result, check_result, file_name, value_of, worlds_of
from grail_lightning.app.benchmark.tables import Section, Table, sections
from grail_lightning.app.benchmark.verdict import findings, verdict
from grail_lightning.app.results.table import markdown, markdown_table, plain
from grail_lightning.app.views.heatmap import LARGEST, shade_of
from grail_lightning.app.views.page import rendered
from grail_lightning.core.runtime.files import write_whole

ABOUT_VERDICT = (
    "Each claim follows from an interval. The intervals of the claims of one question are widened, so that all of them "
    "hold together with a probability of 95 %; those of tables and pictures are 95 % intervals each."
)
ABOUT_ROLLOUTS = "Rollouts of training with the weight of each token: 1 is uniform credit."
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.2, 3.3, LARGEST)  # Of the scale of colours.


def write_report(result: Result, references: Sequence[Result], folder: str | Path) -> list[Path]:
    """Write ``LABEL.json``, ``LABEL.md`` and ``LABEL.html`` into a folder; each appears when it is complete.

    Args:
        result: The result of a method. Its `verdict` is written anew.
        references: Results to compare with, in the order in which they are shown.
        folder: The folder, which is made if it does not exist.

    Returns:
        The three files.

    Raises:
        ValueError: `result` is not a result (see `check_result`).
    """
    check_result(result, "the result")
    name = file_name(result["label"])
    result = result | {"verdict": verdict(result, references)}
    texts = {
        "json": json.dumps(result, indent=1, allow_nan=False) + "\n",
        "md": report_markdown(result, references),
        "html": report_html(result, references),
    }
    files = [Path(folder) / f"{name}.{ending}" for ending in texts]
    for file, text in zip(files, texts.values(), strict=True):
        write_whole(file, text)
    return files


def report_markdown(result: Result, references: Sequence[Result] = ()) -> str:
    """The report as Markdown: the verdict, the tables of each question, rollouts, and what is needed to repeat it."""
    parts = [f"# {_line(title_of(result))}", _line(about(result)), "## Verdict"]
    claims = [(_line(sentence(f.claim)), _line(sentence(f.evidence))) for f in findings(result, references)]
    parts += ["\n".join(f"- **{claim}** {evidence}".rstrip() for claim, evidence in claims), _line(ABOUT_VERDICT)]
    for section in sections(result, references):
        parts += [f"## {section.title}", _line(section.about)]
        for table in [*section.tables, *(picture["table"] for picture in curves_pictures(section, _seeds(result)))]:
            parts += [f"**{_line(table.title)}**", _table(table)]
            parts.append("\n".join(f"- {_line(note)}" for note in table.notes))
    if result.get("examples"):
        parts += ["## Rollouts", _line(ABOUT_ROLLOUTS)]
        for number, example in enumerate(result["examples"], 1):
            parts.append(f"**{number}. {_line(in_words(example['world']))}, {_line(example['outcome'])}**")
            parts += [f"Prompt: {_line(example['prompt'])}", _table(steps_table(example, ""), names=2)]
    parts += ["## To repeat it", _table(repeat_table(result), names=2)]
    return _printable("\n\n".join(part for part in parts if part) + "\n")


def _table(table: Table, names: int = 1) -> str:
    return markdown_table(table.columns, table.rows, names, _line) if table.rows else ""


def _line(text: object) -> str:
    """The text as a part of a line of Markdown."""
    return markdown(plain(text, 4000))


def report_html(result: Result, references: Sequence[Result] = ()) -> str:
    """The report as one page: verdict, pictures, tables, rollouts, and what is needed to repeat it."""
    all_findings = findings(result, references)
    found = [(sentence(finding.claim), sentence(finding.evidence)) for finding in all_findings]
    parts = [
        (section, _by_world(section), curves_pictures(section, _seeds(result)))
        for section in sections(result, references)
    ]
    scale = [(f"{tick:g}", _scale_class(tick)) for tick in _TICKS]
    page = rendered(
        "benchmark",
        "report",
        "tokens",
        title=title_of(result),
        about=about(result),
        main=[sentence(finding.claim) for finding in all_findings if finding.main],
        findings=found,
        about_verdict=ABOUT_VERDICT,
        about_rollouts=ABOUT_ROLLOUTS,
        sections=parts,
        rollouts=rollouts(result),
        scale=scale,
        repeat=repeat_table(result),
    )
    return _printable(page)


def _by_world(section: Section) -> list[dict[str, object]]:
    return [forest_picture(forest) for forest in section.forests]


def _scale_class(weight: float) -> str:
    part = round(20 * abs(shade_of(weight))) * 5
    return f"{'more' if weight > 1 else 'less'} p{part}" if part else ""


def title_of(result: Result) -> str:
    """The heading."""
    return f"{plain(result['label'])}: token credit under test"


def about(result: Result) -> str:
    """One line: what was measured, where and on how much."""
    names = worlds_of(result)
    numbers = [value_of(result, world, "rollouts") for world in names]
    counts = [
        in_words(world) + (f" ({number:,} rollouts)" if number else "")
        for world, number in zip(names, numbers, strict=True)
    ]
    control = result.get("control")
    under = f" under the control {plain(_json(control), 200)}" if control else ""
    where = f" in {listed(counts)}" if counts else ""
    return f"The credit method {plain(result['method'], 200)}{under}, measured on {plain(result['date'])}{where}."


def repeat_table(result: Result) -> Table:
    """Everything that is needed to repeat the measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = {
        "command": result["command"],
        "method": result["method"],
        "options": _json(result["options"]),
        "control": _json(result.get("control")),
        "advantage": _json(result.get("advantage")),
        "reads": ", ".join(result["reads"]) or "nothing but the rollouts, their rewards and the policy",
        "seed": str(result["seed"]),
        "batches of 128 rollouts": str(result["batches"]),
        "package": result["package"],
        "digest of its code": str(result.get("code") or "-"),
        "versions": versions or "-",
        "machine": result["machine"],
        "date": result["date"],
    }
    return Table(title="To repeat it", columns=["what", "value"], rows=[[k, plain(v, 2000)] for k, v in rows.items()])


def _seeds(result: Result) -> dict[str, int]:
    return {world: len(value_of(result, world, "training", "seeds") or []) for world in worlds_of(result)}


def _json(value: object) -> str:
    return "none" if value in (None, {}) else json.dumps(value, ensure_ascii=False)


def _printable(text: str) -> str:
    """The text without lone surrogates, which a file in UTF-8 cannot have."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
