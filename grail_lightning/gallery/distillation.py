"""RLSD (arXiv 2604.03128), and prompts that contain the answer, for its teacher and that of `SDPG`.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from grail_lightning.core.credit.base import CreditContext, TokenCredit, TokenWeights, one_elsewhere, uniform_weights
from grail_lightning.core.credit.measure import logprobs
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.picture import Messages, add_text
from grail_lightning.core.rollout.batch import RolloutBatch, pad_left
from grail_lightning.core.runtime.checks import check_options

_PLACE = "{answer}"
SENTENCE = "The correct answer is {answer}."


@dataclass(eq=False)
class RLSD(TokenCredit):
    r"""Tokens that become more likely when the answer is known earn more of a reward and less of a penalty.

    The teacher ``T`` is the same model with a prompt that also contains the gold answer; the student ``S`` has the
    original prompt:

    .. math:: \Delta_t = \log P_T(y_t) - \log P_S(y_t), \qquad
              w_t = (1 - \lambda) + \lambda\, \mathrm{clip}(e^{\mathrm{sign}(A) \Delta_t},\ 0.8,\ 1.2)

    ``λ`` falls linearly from `strength` to 0 over `decay_steps` optimiser steps, after which no forward pass is needed.
    Rows without an advantage have weight 1, as have those without a reference, which count as fallbacks. The teacher's
    weights are a copy of the trainable ones, on their device (of sharded weights a whole copy on every rank).
    Checkpoints contain this copy until `decay_steps`.

    Args:
        strength: λ at the start.
        decay_steps: The number of optimiser steps until λ is 0.
        clip: The exponential is clipped to 1 ± clip.
        refresh_steps: The number of optimiser steps between copies of the weights; 1 uses the current policy, without a
            copy.
        sentence: The sentence that is appended to the problem; {answer} is replaced by the gold answer.

    Source: arXiv 2604.03128; the wording of the sentence is ours.
    """

    reads_reference = True

    strength: float = 0.5
    decay_steps: int = 50
    clip: float = 0.2
    refresh_steps: int = 10
    sentence: str = SENTENCE

    def __post_init__(self) -> None:
        check_options(self, strength="[0, 1]", clip="[0, 1]", decay_steps="[1, inf)", refresh_steps="[1, inf)")
        check_sentence("sentence", self.sentence)
        self._copied_at = 0
        self._weights: dict[str, Tensor] = {}

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the teacher and the student."""
        mask, has_reference = batch.response_mask, torch.tensor([bool(prompt.reference) for prompt in batch.prompts])
        weighed = (batch.advantages != 0) & has_reference.to(mask.device)
        share = self.strength * max(0.0, 1 - context.step / self.decay_steps)
        teacher = self._teacher(policy, context.step)
        if share == 0:
            return uniform_weights(batch)
        rows = weighed.nonzero().flatten()
        student = logprobs(policy, batch, context, rows)
        gap = logprobs(policy, with_shown_answers(policy, batch, self.sentence), context, rows, teacher) - student
        factor = (batch.advantages.sign()[:, None] * gap).exp().clamp(1 - self.clip, 1 + self.clip)
        values = one_elsewhere((1 - share) + share * factor, mask & weighed[:, None], mask)
        return TokenWeights(values=values, scores=gap, fallback=(batch.advantages != 0) & ~weighed)

    def state_dict(self) -> dict[str, Any]:
        """The teacher's state for a checkpoint: its weights, and the optimiser step at which they were copied."""
        return {"copied_at": self._copied_at, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the teacher of a checkpoint. If there is none, a copy is taken at the next batch."""
        self._copied_at, self._weights = state.get("copied_at", 0), dict(state.get("weights", {}))

    def _teacher(self, policy: Policy, step: int) -> Callable[..., Tensor] | None:
        """A function that runs the policy with the copied weights; None if the policy itself is the teacher."""
        if self.refresh_steps == 1 or step >= self.decay_steps:
            self._weights = {}
            return None
        trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        fresh = step // self.refresh_steps == self._copied_at // self.refresh_steps
        if not fresh or self._weights.keys() != trainable.keys():
            self._copied_at = step
            self._weights = {name: p.detach().clone() for name, p in trainable.items()}
        # Weights from a checkpoint are on the CPU.
        weights = self._weights = {name: w.to(trainable[name].device) for name, w in self._weights.items()}
        # The copies replace the parameters during a call; the parameters themselves are not written to.
        return lambda *inputs, **options: functional_call(policy, weights, inputs, options)


def check_sentence(name: str, sentence: str) -> None:
    """Check that a sentence has a place for the answer."""
    if _PLACE not in sentence:
        raise ValueError(f"`{name}` must contain {_PLACE}, where the gold answer goes, but got {sentence!r}.")


def with_shown_answers(policy: Policy, batch: RolloutBatch, sentence: str) -> RolloutBatch:
    """The same responses after prompts that end with `sentence`, in which {answer} is the reference answer.

    Raises:
        ValueError: If a prompt also has the text or the tools of an environment.
    """
    if batch.turn is not None:
        _check_prompts(policy, batch)
    sentences = [sentence.replace(_PLACE, prompt.reference) for prompt in batch.prompts]
    messages = [with_sentence(p.messages, s) for p, s in zip(batch.prompts, sentences, strict=True)]
    ids, mask = pad_left([policy.encode(m) for m in messages], policy.tokenizer.pad_token_id)
    device = batch.input_ids.device
    return batch.replace(
        input_ids=torch.cat([ids.to(device), batch.response_ids], 1),
        attention_mask=torch.cat([mask.to(device), batch.valid_mask], 1),
    )


def _check_prompts(policy: Policy, batch: RolloutBatch) -> None:
    width = batch.prompt_width
    rows = zip(batch.input_ids[:, :width], batch.attention_mask[:, :width], batch.prompts, strict=True)
    for row, (ids, mask, prompt) in enumerate(rows):
        if ids[mask].tolist() != policy.encode(prompt.messages):
            raise ValueError(
                "A teacher that is shown the answer needs prompts that are their messages alone, but got a prompt with "
                f"the tools or the text of an environment in row {row}. Set another `model.credit`, or another "
                "`model.objective` than SDPG."
            )


def with_sentence(messages: Messages | str, sentence: str) -> Messages | str:
    """The problem with a sentence appended to the last turn of the user, before any white space at its end."""
    if isinstance(messages, str):
        text = messages.rstrip()
        return f"{text} {sentence}{messages[len(text) :]}"
    last = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    return [
        {**message, "content": _appended(message["content"], sentence)} if k == last else message
        for k, message in enumerate(messages)
    ]


def _appended(content: Any, sentence: str) -> Any:
    return with_sentence(content, sentence) if isinstance(content, str) else add_text(content, f" {sentence}")
