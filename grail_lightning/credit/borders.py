"""Places that divide a response into steps: behind labelled steps, behind lines, or before tokens of high entropy.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext
from grail_lightning.credit.forward import entropies
from grail_lightning.functional.attribution import top_tokens
from grail_lightning.grading import align_rows
from grail_lightning.grading.locate import labelled_steps
from grail_lightning.policy import Policy

Borders = Literal["steps", "lines", "entropy"]


def find_borders(
    policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor, borders: Borders, most: int
) -> list[list[int]]:
    """The borders of some rows, each as the number of response tokens before it, in rising order.

    A border behind a piece of text is the one behind the token that holds its last character.

    Args:
        policy: The policy.
        batch: The rollouts, ``B`` rows.
        context: The context, for forward passes.
        rows: ``[n]`` long, the rows to divide.
        borders: ``steps`` of the task's labels (``lines`` for rows that it cannot label), ``lines`` of the text, or the
            tokens of highest ``entropy``, each of which begins a step. The last takes a forward pass.
        most: Most borders of a row by entropy.

    Returns:
        ``n`` lists of numbers from 1 to one less than the row's tokens.
    """
    if borders == "entropy":
        return _before_choices(entropies(policy, batch, context, rows), batch, rows, most)
    some = batch.select(rows.cpu())
    found = []
    for aligned, prompt, length in zip(
        align_rows(some, policy.tokenizer), some.prompts, some.response_lengths.tolist(), strict=True
    ):
        steps = labelled_steps(aligned.text, prompt) if borders == "steps" else None
        ends = [step.stop for step in steps] if steps else _line_ends(aligned.text)
        behind = {max(tokens) + 1 for end in ends if end and (tokens := aligned.overlapping(end - 1, end))}
        found.append(sorted(place for place in behind if 0 < place < length))
    return found


def _line_ends(text: str) -> list[int]:
    return [place + 1 for place, character in enumerate(text) if character == "\n"]


def _before_choices(found: Tensor, batch: RolloutBatch, rows: Tensor, most: int) -> list[list[int]]:
    mask = batch.response_mask.clone()
    mask[:, 0] = False  # A border before the first token divides nothing.
    chosen = top_tokens(found, mask, torch.full((len(mask),), most, device=mask.device))
    return [chosen[row].nonzero().flatten().tolist() for row in rows.tolist()]
