r"""Grade by hand: `python -m grail_lightning.answers GOLD PREDICTION`.

Prints the verdict, the layer that made it, and both answers as the layers saw them. A prediction with a `\boxed{...}`
is graded by its last box, as in training. Answers may begin with a minus sign: what is no option of this command is an
answer. Pairs in a file are graded by `benchmarks/grading.py --cases FILE`.
"""

import argparse
import sys

from grail_lightning.answers.compare import capped
from grail_lightning.answers.evaluated import unevaluated
from grail_lightning.answers.find import box_content
from grail_lightning.answers.normalise import normalise
from grail_lightning.answers.verifier import Verifier

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the program: 0 if the answer is right, 1 if not."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--help", action="store_true", help="show this text and exit")
    flags.add_argument("--timeout", type=float, default=5.0, help="seconds for the pair (default: 5)")
    flags.add_argument(
        "--evaluated", action="store_true", help="refuse an answer that could still be carried out, such as 7+5 for 12"
    )
    parser = argparse.ArgumentParser(
        "python -m grail_lightning.answers", description=__doc__.splitlines()[0], parents=[flags], add_help=False
    )
    parser.add_argument("gold", help="the reference answer")
    parser.add_argument("prediction", help="the model's answer, bare or in a response with a box")
    options, positionals = flags.parse_known_args(arguments)
    if options.help or positionals == ["-h"]:
        parser.print_help()
        return 0
    if "--" in positionals:
        positionals.remove("--")
    parser.parse_args(["--", *positionals], options)  # behind the mark, `-\frac12` is no option
    content = box_content(options.prediction)
    prediction = options.prediction if content is None else content
    with Verifier(num_workers=1, timeout_seconds=options.timeout) as verifier:
        verdict = verifier.grade([(options.gold, prediction)])[0]
    refused = options.evaluated and verdict.correct and unevaluated(options.gold, prediction)
    print(f"{'unevaluated' if refused else verdict.status}  (layer: {verdict.layer})")
    for title, text in (("gold", options.gold), ("prediction", prediction)):
        print(f"{title:<10}  {'(beyond the caps)' if capped(text) else repr(normalise(text))}")
    return 0 if verdict.correct and not refused else 1


if __name__ == "__main__":
    sys.exit(main())
