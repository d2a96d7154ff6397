"""The time saved by locating answers while the verifier's processes compare them.

    OMP_NUM_THREADS=1 python benchmarks/grading_overlap.py --rows 256 --tokens 200 --workers 1

Responses of about `--tokens` tokens end in a root that is written in another form than the gold, or in another root:
every pair needs a worker. Both sides grade the same batch in turn, with an empty cache and running workers.
"""

import argparse
import statistics
import time

from grail_lightning.answers import Verifier
from grail_lightning.batch import SampledBatch
from grail_lightning.engines.base import build_batch
from grail_lightning.grading import align_rows, answer_masks, grade_and_locate, grade_answers
from grail_lightning.policy import load_policy
from grail_lightning.tasks import MathTask


def responses(policy, rows: int, tokens: int) -> SampledBatch:
    """Responses of which half are right and no two are equal."""
    task, prompts, texts = MathTask(), [], []
    filler = "7+5=12 12-3=9 "
    for k in range(rows):
        inner = k + 2
        answer = rf"\frac{{\sqrt{{{inner}}}}}{{{inner + k % 2}}}"
        prompts.append(task.prompt({"problem": "Compute.", "answer": rf"\frac{{1}}{{\sqrt{{{inner}}}}}"}))
        texts.append(rf"\boxed{{{answer}}}.")
    encode = policy.tokenizer.encode
    begun = (encode(filler) * tokens)[: max(0, tokens - len(encode(texts[0])))]
    ids = [begun + encode(text) for text in texts]
    return build_batch(policy, prompts, 1, ids, [True] * rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    policy = load_policy("arithmetic")
    batch = responses(policy, options.rows, options.tokens)

    def locate(verifier):
        return answer_masks(batch, align_rows(batch, policy.tokenizer))

    def grade(verifier):
        return grade_answers(batch.texts, batch.prompts, verifier)

    def one_after_the_other(verifier):
        locate(verifier)
        return grade(verifier)

    def together(verifier):
        return grade_and_locate(batch, verifier, policy.tokenizer)

    sides = {
        "locate": locate,
        "grade": grade,
        "one after the other": one_after_the_other,
        "together": together,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with Verifier(num_workers=options.workers) as verifier:
        verdicts = together(verifier).verdicts
        assert [v.correct for v in verdicts] == [v.correct for v in one_after_the_other(verifier)]
        asked = sum(verdict.layer == "symbolic" or not verdict.correct for verdict in verdicts)
        for repeat in range(options.repeats):
            for name in sorted(sides, reverse=bool(repeat % 2)):
                verifier.__dict__["_cache"].clear()
                start = time.perf_counter()
                sides[name](verifier)
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    right = sum(verdict.correct for verdict in verdicts)
    print(
        f"{len(batch)} rows of {options.tokens} tokens, {options.workers} worker(s), {asked} for workers, {right} right"
    )
    print("| | seconds | |\n|---|--:|--:|")
    for name, value in medians.items():
        print(f"| {name} | {value:.3f} | {value / medians['one after the other']:.2f} |")


if __name__ == "__main__":
    main()
