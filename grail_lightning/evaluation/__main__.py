r"""Look at kept samples: `python -m grail_lightning.evaluation regrade RUN`.

`regrade` grades the samples again without sampling, says which verdicts have changed, and prints the table anew. With
`--output FOLDER` it writes the samples with their new verdicts; the old files stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grail_lightning.answers import Verifier
from grail_lightning.evaluation.records import (
    Sample,
    SampleWriter,
    read_evaluation,
    read_samples,
    write_evaluation,
)
from grail_lightning.evaluation.regrade import changed_verdicts, regraded, table_of
from grail_lightning.evaluation.table import evaluation_table
from grail_lightning.runtime.arguments import Parser, refused

_SHOWN = 80


def main(arguments: list[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: The command line without the program's name; None for the process's own.

    Returns:
        0, or 2 for a user's mistake, which is one line on stderr.
    """
    try:
        options = _parser().parse_args(arguments)
        _regrade(options.folder, options.output)
    except (ValueError, OSError) as error:
        return refused("grail_lightning.evaluation", error, choose="folder")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m grail_lightning.evaluation", description=__doc__.splitlines()[0])
    regrade = parser.add_subparsers(dest="command", required=True).add_parser(
        "regrade", help="grade kept samples again, without sampling"
    )
    regrade.add_argument("folder", type=Path, help="the folder of a run that was tested, or a folder `samples`")
    regrade.add_argument("--output", type=Path, help="a new folder for the samples with their new verdicts")
    return parser


def _regrade(folder: Path, output: Path | None) -> None:
    inside = (folder / part for part in ("samples", "test/samples"))
    folder = next((part for part in inside if part.is_dir()), folder)
    facts = read_evaluation(folder)
    if output is not None and output.exists():
        raise ValueError(f"`--output` must be a new folder, but {output} exists. Give another, or remove it.")
    before = sorted(read_samples(folder), key=lambda sample: (sample.dataset, sample.index, sample.sample))
    with Verifier() as verifier:
        after = regraded(before, facts, verifier)
    changed = changed_verdicts(before, after)
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
        _write(output, facts, after)


def _write(output: Path, facts: dict[str, Any], samples: Sequence[Sample]) -> None:
    output.mkdir(parents=True)
    write_evaluation(output, facts | {"regraded": datetime.now().astimezone().isoformat(timespec="seconds")})
    writer = SampleWriter(output, 0)
    writer.write(samples)
    writer.close()
    print(f"\nThe samples with their new verdicts are in {output}.")


def _short(text: str | None) -> str:
    """A text of a model's, so that it cannot steer a terminal."""
    shown = ascii(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
