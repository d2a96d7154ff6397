r"""Grade by hand: `python -m grail_lightning.answers GOLD PREDICTION`, or a file of pairs with `--jsonl FILE`.

Prints the verdict, the layer that made it, and both answers as the layers saw them. A prediction with a `\boxed{...}`
is graded by its last box, as in training. In a file each line has the keys `gold` and `prediction` (or `pred`), and may
have `expected` and `category`; then a summary by category and every disagreement follow.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from grail_lightning.answers.compare import Conventions, capped
from grail_lightning.answers.find import box_content
from grail_lightning.answers.normalise import normalise
from grail_lightning.answers.verifier import Verifier

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the program: 0 if the answer is right (of a file, if none was missed), 1 if not, 2 for a bad file."""
    parser = argparse.ArgumentParser(prog="python -m grail_lightning.answers", description=__doc__.splitlines()[0])
    parser.add_argument("gold", nargs="?", help="the reference answer")
    parser.add_argument("prediction", nargs="?", help="the model's answer, bare or in a response with a box")
    parser.add_argument("--jsonl", type=Path, help="file of pairs instead")
    parser.add_argument("--workers", type=int, default=None, help="worker processes (default: one a core)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for one pair (default: 5)")
    options = parser.parse_args(arguments)
    if options.jsonl is None and (options.gold is None or options.prediction is None):
        parser.error("expected GOLD and PREDICTION, or --jsonl FILE")
    with Verifier(num_workers=options.workers, timeout_seconds=options.timeout) as verifier:
        if options.jsonl is None:
            return _grade_one(verifier, options.gold, _bare(options.prediction))
        try:
            lines = enumerate(options.jsonl.read_text().splitlines(), 1)
            rows = [_row(line, f"{options.jsonl}:{place}") for place, line in lines if line.strip()]
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        return _grade_file(verifier, rows)


def _bare(prediction: str) -> str:
    content = box_content(prediction)
    return prediction if content is None else content


def _grade_one(verifier: Verifier, gold: str, prediction: str) -> int:
    verdict = verifier.grade([(gold, prediction)])[0]
    print(f"{verdict.status}  (layer: {verdict.layer})")
    for title, text in (("gold", gold), ("prediction", prediction)):
        print(f"{title:<10}  {'(beyond the caps)' if capped(text, Conventions()) else repr(normalise(text))}")
    return 0 if verdict.correct else 1


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        prediction = row["prediction"] if "prediction" in row else row["pred"]
        texts = {"gold": str(row["gold"]), "prediction": str(prediction)}
        return {"category": "all", "expected": None, **row, **texts}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place}: expected a JSON object with `gold` and `prediction` (or `pred`), "
            f"but got {line[:80]!r} ({error})."
        ) from error


def _grade_file(verifier: Verifier, rows: list[dict[str, Any]]) -> int:
    verdicts = verifier.grade([(row["gold"], _bare(row["prediction"])) for row in rows])
    graded = list(zip(rows, verdicts, strict=True))
    missed = [(row, v) for row, v in graded if row["expected"] is not None and bool(row["expected"]) != v.correct]
    print(f"{'category':<28}{'pairs':>7}{'right':>7}{'false accepts':>15}{'misses':>8}")
    for category in [*sorted({str(row["category"]) for row in rows}), None]:
        ours, wrong = ([v for row, v in some if category in (None, str(row["category"]))] for some in (graded, missed))
        accepts = sum(verdict.correct for verdict in wrong)
        right = sum(verdict.correct for verdict in ours)
        print(f"{category or 'TOTAL':<28}{len(ours):>7}{right:>7}{accepts:>15}{len(wrong) - accepts:>8}")
    print("status:", dict(Counter(verdict.status for verdict in verdicts).most_common()))
    for row, verdict in missed:
        kind = "false accept" if verdict.correct else "miss"
        print(f"{kind}: gold {row['gold']!r}, prediction {row['prediction']!r}: {verdict.status}, {verdict.layer}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
