"""Prompts that contain the answer, for a teacher that knows it: RLSD's, or that of the objective (SDPG)."""

from __future__ import annotations

from typing import Any

import torch

from grail_lightning.batch import RolloutBatch, pad_left
from grail_lightning.picture import add_text
from grail_lightning.policy import Policy
from grail_lightning.tasks.problem import Messages

_PLACE = "{answer}"
SENTENCE = "The correct answer is {answer}."


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
                f"the tools or the text of an environment in row {row}. Set another `model.credit` or no "
                "`objective.distillation`."
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
