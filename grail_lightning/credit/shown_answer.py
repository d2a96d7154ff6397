"""Prompts that contain the reference answer, for teachers that know it (RLSD, SDPG).

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

import torch

from grail_lightning.batch import RolloutBatch, pad_left
from grail_lightning.policy import Policy
from grail_lightning.tasks.base import Messages

_PLACE = "{answer}"
SENTENCE = "The correct answer is {answer}."


def check_sentence(name: str, sentence: str) -> None:
    """Check that a sentence has a place for the answer.

    Raises:
        ValueError: If it has none.
    """
    if _PLACE not in sentence:
        raise ValueError(f"`{name}` must contain {_PLACE}, where the gold answer goes, but got {sentence!r}.")


def with_shown_answers(policy: Policy, batch: RolloutBatch, sentence: str) -> RolloutBatch:
    """The same responses after prompts that contain the reference answer.

    Args:
        policy: The policy, which encodes the prompts.
        batch: The rollouts, ``B`` rows.
        sentence: The sentence that is appended to each problem; {answer} is replaced by the reference.
    """
    sentences = [sentence.replace(_PLACE, prompt.reference) for prompt in batch.prompts]
    messages = [with_sentence(p.messages, s) for p, s in zip(batch.prompts, sentences, strict=True)]
    ids, mask = pad_left([policy.encode(m) for m in messages], policy.tokenizer.pad_token_id)
    device = batch.input_ids.device
    return batch.replace(
        input_ids=torch.cat([ids.to(device), batch.response_ids], 1),
        attention_mask=torch.cat([mask.to(device), batch.response_mask], 1),
    )


def with_sentence(messages: Messages | str, sentence: str) -> Messages | str:
    """The problem with a sentence appended to the last turn of the user, before any white space at its end."""
    if isinstance(messages, str):
        text = messages.rstrip()
        return f"{text} {sentence}{messages[len(text) :]}"
    last = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    return [
        {**message, "content": str(with_sentence(message["content"], sentence))} if k == last else message
        for k, message in enumerate(messages)
    ]
