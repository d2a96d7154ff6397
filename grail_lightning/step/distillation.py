"""SDPG's loss: the KL to a teacher, the same policy with the answer in its prompt (arXiv 2606.04036).

Shapes: ``n`` rows, ``M`` predictions of a layout, ``D`` width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.distillation import SENTENCE, check_sentence, with_shown_answers
from grail_lightning.policy.capabilities import within_attention_window
from grail_lightning.policy.layout import TokenLayout, gather_rows
from grail_lightning.policy.micro_batch import MicroBatch
from grail_lightning.policy.model import Policy
from grail_lightning.runtime.checks import check_options


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The options of SDPG's loss: the KL to the same policy with the answer in its prompt (arXiv 2606.04036).

    Attributes:
        coefficient: Coefficient β of the KL, in nats a token.
        only_positive: Whether it acts on rollouts with a positive advantage alone.
        clamp: Largest KL of a token that counts; a larger one has no gradient.
        sentence: The sentence that the teacher's problem ends with; {answer} is replaced by the reference answer.

    Raises:
        ValueError: If a number is out of its range, or the sentence has no {answer}.
    """

    coefficient: float = 1e-3
    only_positive: bool = False
    clamp: float = 20.0
    sentence: str = SENTENCE

    def __post_init__(self) -> None:
        check_options(self, "objective.distillation", coefficient="(0, inf)", clamp="(0, inf)")
        check_sentence("objective.distillation.sentence", self.sentence)

    def strength(self, advantages: Tensor) -> Tensor:
        """``[n, 1]``: β of each row, from the rows' advantages ``[n]``."""
        taught = advantages > 0 if self.only_positive else torch.ones_like(advantages, dtype=torch.bool)
        return self.coefficient * taught[:, None]


class Teacher:
    """Runs rows behind prompts that contain the reference answer, without gradient and dropout."""

    def __init__(self, policy: Policy, batch: RolloutBatch, sentence: str) -> None:
        self.policy, self.batch = policy, with_shown_answers(policy, batch, sentence)

    def states(self, micro: MicroBatch, layout: TokenLayout) -> Tensor:
        """``[M, D]``: the decoder's output at the predictions of the student's layout of a micro-batch.

        Rows that share a prediction in the student's layout have the same teacher, since they are of one group.
        """
        states: list[Tensor] = []

        def decode(own: TokenLayout) -> Tensor:
            states.append(self.policy.decode(own))
            return states[0]

        # Its rows are longer than those for which the trees were made.
        shared = within_attention_window(self.policy, self.batch.input_ids.shape[1])
        own = self.policy.layout(self.batch.select(micro.rows), micro.starts if shared else None)
        with self.policy.evaluating(), torch.no_grad():
            # Through the policy's own call: sharded weights (FSDP2) are whole only inside of it.
            self.policy(own, decode=decode)
            of_tokens = gather_rows(own.at_predictors(states[0]), own.prediction_of)
        return of_tokens[layout.source_of]
