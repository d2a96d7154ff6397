"""The lines of the world of programs in benchmarks/credit_gradients.py and credit_statements.py."""

from __future__ import annotations

from credit_subjects import Subject

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import EGCA, GRAIL, CreditContext, ExecutedMask, OARGradient, Oracle, TokenCredit
from grail_lightning.credit.base import TokenWeights
from grail_lightning.grading import align_rows, answer_masks
from grail_lightning.policy import Policy


class WholeProgram(TokenCredit):
    """A method that explains an answer, which is the whole program; else it is the last `return`."""

    def __init__(self, inner: TokenCredit) -> None:
        self.inner = inner

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch of one `CodeTask`."""
        task = batch.prompts[0].task
        task.explained = "program"
        answer = answer_masks(batch, align_rows(batch, policy.tokenizer))
        task.explained = "return"
        return self.inner(policy, batch.replace(answer=answer), context)


def of_programs(every: list[Subject]) -> list[Subject]:
    """The lines that run in the world of programs, and the methods that run programs. `Oracle` reads the labels."""
    own = {
        "GRAIL, program": WholeProgram(GRAIL(answer_overwrite="never")),
        "OAR-G, program": WholeProgram(OARGradient()),
        "EGCA": EGCA(),
        "EGCA, w_max=1": EGCA(w_max=1),
        "EGCA, right=balanced": EGCA(right="balanced"),
        "EGCA, random": EGCA(blamed="random"),
        "EGCA, random, w_max=1": EGCA(blamed="random", w_max=1),
        "EGCA, last": EGCA(blamed="last"),
        "EGCA, permuted": EGCA(blamed="permuted"),
        "ExecutedMask": ExecutedMask(),
        "Oracle": Oracle(),
    }
    running = [s for s in every if not any(part in s.name for part in ("numbers", "Resampled"))]
    return [*running, *(Subject(name=name, method=method) for name, method in own.items())]
