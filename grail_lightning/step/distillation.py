"""The teacher of SDPG's loss: the policy that is trained, with the reference answer in its prompt.

Shapes: ``M`` predictions of a layout, ``D`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.shown_answer import with_shown_answers
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import TokenLayout, gather_rows
from grail_lightning.policy.micro_batch import MicroBatch
from grail_lightning.step.options import Distillation


class Teacher:
    """Runs the rows of a batch behind prompts that contain the reference answer, without gradient and dropout.

    Args:
        policy: The policy that is trained.
        batch: The rollouts, ``B`` rows.
        sentence: The sentence that the problem ends with; {answer} is replaced by the reference answer.
    """

    def __init__(self, policy: Policy, batch: RolloutBatch, sentence: str) -> None:
        self.policy, self.batch = policy, with_shown_answers(policy, batch, sentence)

    def states(self, micro: MicroBatch, layout: TokenLayout) -> Tensor:
        """``[M, D]``: the decoder's output at the predictions of the student's layout of a micro-batch.

        Rows that share a prediction in the student's layout have the same teacher, since they are of one group.
        """
        kept: list[Tensor] = []

        def decode(own: TokenLayout) -> Tensor:
            kept.append(self.policy.decode(own))
            return kept[0]

        own = self.policy.layout(self.batch.select(micro.rows), micro.starts)
        with self.policy.evaluating(), torch.no_grad():
            # Through the policy's own call: sharded weights (FSDP2) are whole only inside of it.
            self.policy(own, decode=decode)
            of_tokens = gather_rows(own.at_predictors(kept[0]), own.prediction_of)
        return of_tokens[layout.source_of]


def find_teacher(policy: Policy, batch: RolloutBatch, options: Distillation | None, step: int) -> Teacher | None:
    """The teacher of a batch; None if the options ask for none at this optimiser step."""
    if options is None or not options.strength(step):
        return None
    return Teacher(policy, batch, options.sentence)
