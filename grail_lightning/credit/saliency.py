"""Input-gradient saliency: how much each position moves the log-likelihood of some of the response's tokens.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grail_lightning.functional.tokens import token_logprobs
from grail_lightning.policy import Policy
from grail_lightning.rollout import RolloutBatch, lengths_to_mask, micro_batches

Leaf = Literal["embeddings", "first", "middle", "last"]
Alignment = Literal["predictor", "token"]


def input_saliency(
    policy: Policy,
    batch: RolloutBatch,
    objective_mask: Tensor,
    *,
    leaf: Leaf | int = "embeddings",
    alignment: Alignment = "predictor",
    temperature: float = 1.0,
) -> Tensor:
    r"""Gradient times activation of the negative log-likelihood of the masked tokens.

    .. math:: \phi = -\sum_{t \in mask} \log\pi(y_t \mid x, y_{<t}), \qquad
              s_t = \lVert \partial\phi/\partial a \odot a \rVert_2

    The head runs on the masked positions alone; parameters take no gradient, and below a block leaf no graph is kept.
    Gradients, training mode, hooks and the random state are left as they were, also when this raises.

    Args:
        policy: Answers for the log-probabilities.
        batch: ``B`` rows; columns behind the last masked token cannot change the result: cut them off before.
        objective_mask: ``[B, T]`` bool, the tokens whose likelihood is explained.
        leaf: "embeddings", or the output of a block: "first" (block 1), "middle" (n // 2), "last" (n − 1, the
            penultimate), or its number from 1 to n.
        alignment: "predictor" reads for token ``t`` the position ``t − 1``, which predicts it; "token" reads ``t``.
        temperature: Divides the logits.

    Returns:
        ``[B, T]`` float32 (float64 for a float64 policy), zero outside the response mask.

    Raises:
        ValueError: For an unknown leaf or alignment, or a mask that reaches outside the response.

    Source: GRAIL, arXiv 2606.04889, published trainer.
    """
    if (objective_mask & ~batch.response_mask).any():
        raise ValueError("`objective_mask` must lie within the response mask.")
    if alignment not in ("predictor", "token"):
        raise ValueError(f"`alignment` must be predictor or token, but got {alignment!r}.")
    length = batch.response_mask.shape[1]
    with explaining(policy), torch.enable_grad():
        states, activation = _forward_from_leaf(policy, batch, leaf)
        answer = token_logprobs(
            states[:, -length - 1 : -1][objective_mask],
            policy.head,
            batch.response_ids[objective_mask],
            temperature=temperature,
            chunk_tokens=policy.loading.chunk_tokens,
        )
        gradient: Tensor = torch.autograd.grad(-answer.logprobs.sum(), activation)[0]
    exact = torch.promote_types(activation.dtype, torch.float32)
    score: Tensor = torch.linalg.vector_norm(gradient.to(exact) * activation.detach().to(exact), dim=-1)
    aligned = score[:, -length - 1 : -1] if alignment == "predictor" else score[:, -length:]
    return aligned.masked_fill(~batch.response_mask, 0)


def saliency_of_rows(
    policy: Policy,
    batch: RolloutBatch,
    objective_mask: Tensor,
    rows: Tensor,
    *,
    token_budget: int,
    leaf: Leaf | int = "embeddings",
    alignment: Alignment = "predictor",
    temperature: float = 1.0,
) -> Tensor:
    """`input_saliency` of some rows, each cut off behind its last masked token, in micro-batches.

    Args:
        policy: As for `input_saliency`.
        batch: ``B`` rows.
        objective_mask: ``[B, T]`` bool.
        rows: ``[n]`` long, the rows to compute.
        token_budget: Most padded tokens of a micro-batch.
        leaf: As for `input_saliency`.
        alignment: As for `input_saliency`.
        temperature: As for `input_saliency`.

    Returns:
        ``[B, T]``, zero on all other rows and behind the last masked token.
    """
    ends = last_marked(objective_mask)
    short = cut_responses(batch, ends)
    objective = short.response_mask & objective_mask
    scores = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=batch.response_mask.device)
    for part in micro_batches(torch.stack([batch.prompt_lengths, ends], 1), token_budget, rows):
        piece = short.select(part)
        columns = piece.response_mask.shape[1]
        part = part.to(scores.device)
        found = input_saliency(
            policy, piece, objective[part, :columns], leaf=leaf, alignment=alignment, temperature=temperature
        )
        scores = scores.to(found.dtype)
        scores[part, :columns] = found
    return scores


def block_number(leaf: Leaf | int, num_blocks: int) -> int:
    """Which block's output a leaf is, counted from 1; 0 is the embeddings.

    Raises:
        ValueError: For an unknown name or a number outside the stack.
    """
    named = {"embeddings": 0, "first": 1, "middle": num_blocks // 2, "last": num_blocks - 1}
    number = named.get(leaf, -1) if isinstance(leaf, str) else leaf
    if not 0 <= number <= num_blocks or (number == 0 and leaf not in ("embeddings", 0)):
        raise ValueError(
            f"`leaf` must be embeddings, first, middle, last or a block number up to {num_blocks}, but got {leaf!r}."
        )
    return number


def _forward_from_leaf(policy: Policy, batch: RolloutBatch, leaf: Leaf | int) -> tuple[Tensor, Tensor]:
    """The decoder's output ``[B, P+T, D]``, and the leaf ``[B, P+T, D]`` from which its graph starts."""
    number = block_number(leaf, len(policy.blocks))
    embeds = policy.embed(batch.input_ids).detach()
    if number == 0:
        embeds.requires_grad_(True)
        return policy.hidden(batch.attention_mask, embeds=embeds), embeds
    caught: list[Tensor] = []

    def cut_here(module: nn.Module, args: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        caught.append(tensor.detach().requires_grad_(True))
        return (caught[0], *output[1:]) if isinstance(output, tuple) else caught[0]

    hook = policy.blocks[number - 1].register_forward_hook(cut_here)
    try:
        states = policy.hidden(batch.attention_mask, embeds=embeds)
    finally:
        hook.remove()
    return states, caught[0]


@contextmanager
def explaining(policy: Policy) -> Iterator[None]:
    """Evaluation mode (checkpointed blocks stay checkpointed) and frozen parameters, then all as it was."""
    modes = {module: module.training for module in policy.modules()}
    trainable = [p for p in policy.parameters() if p.requires_grad]
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            policy.eval()
            for module in modes:
                # Transformers recomputes a block only in training mode; its children, and so its dropout, stay in eval.
                module.training = bool(getattr(module, "gradient_checkpointing", False)) and modes[module]
            for parameter in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
            for module, mode in modes.items():
                module.training = mode


def last_marked(mask: Tensor) -> Tensor:
    """``[B]`` long: one more than the last True column of each row of ``[B, T]``; 0 for an empty row."""
    return (torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask).amax(1)


def cut_responses(batch: RolloutBatch, ends: Tensor) -> RolloutBatch:
    """The batch with each response ending before column `ends` ``[B]``; the columns stay."""
    kept = lengths_to_mask(ends, batch.response_mask.shape[1]) & batch.response_mask
    attention = torch.cat([batch.attention_mask[:, : batch.prompt_width], kept], 1)
    return batch.replace(response_mask=kept, attention_mask=attention)
