"""SDPG: policy gradients beside a distillation of the policy from itself, with the answer in its prompt.

Shapes: ``b`` rows of a micro-batch with ``t`` tokens, ``M`` predictions of a layout, ``D`` width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext
from grail_lightning.core.objective import Companion, DrGRPO
from grail_lightning.core.policy.capabilities import within_attention_window
from grail_lightning.core.policy.layout import TokenLayout, gather_rows
from grail_lightning.core.policy.micro_batch import MicroBatch
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.gallery.distillation import SENTENCE, check_sentence, with_shown_answers


@dataclass(frozen=True, kw_only=True)
class SDPG(DrGRPO):
    r"""Dr. GRPO with a KL to the same policy, whose prompt also contains the answer (self-distillation).

    .. math:: \ell_{it} \mathrel{+}= \beta \min\big(\mathrm{KL}(\pi(\cdot \mid x, y_{<t}) \,\|\,
              \mathrm{sg}\, \pi(\cdot \mid c, x, y_{<t})),\ k\big)

    The KL is over the whole vocabulary, ``c`` the `sentence` with the answer, ``k`` the `clamp`. It acts beside any
    credit method and also on rollouts without an advantage. The clips are 0.2 and 0.28, those of the published runs.

    Attributes:
        coefficient: Coefficient β of the KL, in nats a token.
        only_positive: Whether it acts on rollouts with a positive advantage alone.
        clamp: Largest KL of a token that counts; a larger one has no gradient.
        sentence: The sentence that the teacher's problem ends with; {answer} is replaced by the reference answer.

    Raises:
        ValueError: If a number is out of its range, or the sentence has no {answer}.

    Source: SDPG, arXiv 2606.04036, and its published code, whose runs have β = 1e-3 and a dual clip beside it
    (`ratio_cap`); the wording of the sentence is ours.
    """

    clip_high: float = 0.28
    coefficient: float = 1e-3
    only_positive: bool = False
    clamp: float = 20.0
    sentence: str = SENTENCE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, "objective", coefficient="(0, inf)", clamp="(0, inf)")
        check_sentence("objective.sentence", self.sentence)

    @property
    def trains_all_rows(self) -> bool:
        """Whether rows without an advantage have a gradient, too."""
        return super().trains_all_rows or not self.only_positive

    def companion(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Companion:
        """The teacher of a batch."""
        return _Teacher(self, policy, batch)


class _Teacher(Companion):
    """The policy behind prompts that contain the reference answer, without gradient and dropout."""

    figure = "distillation_kl"

    def __init__(self, options: SDPG, policy: Policy, batch: RolloutBatch) -> None:
        self.options, self.policy = options, policy
        self.batch = with_shown_answers(policy, batch, options.sentence)

    def states(self, micro: MicroBatch, layout: TokenLayout) -> Tensor:
        """``[M, D]``: the decoder's output at the predictions of the student's layout of a micro-batch.

        Rows that share a prediction in the student's layout have the same teacher, since they are of one group.
        """
        # Its rows are longer than those for which the trees were made.
        shared = within_attention_window(self.policy, self.batch.input_ids.shape[1])
        teacher_layout = self.policy.layout(self.batch.select(micro.rows), micro.starts if shared else None)
        with self.policy.evaluating(), torch.no_grad():
            # Through the policy's own call: sharded weights (FSDP2) are whole only inside of it.
            states: Tensor = self.policy(teacher_layout, figures=lambda states: states)
            of_tokens = gather_rows(states, teacher_layout.prediction_of)
        return of_tokens[layout.source_of]

    def losses(self, divergence: Tensor, advantages: Tensor) -> Tensor:
        """``[b, t]``: β times the clamped KL, on the rows that are taught."""
        taught = advantages > 0 if self.options.only_positive else torch.ones_like(advantages, dtype=torch.bool)
        return self.options.coefficient * taught[:, None] * divergence.clamp(max=self.options.clamp)
