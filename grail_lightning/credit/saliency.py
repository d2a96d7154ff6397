"""Input-gradient saliency: how much each position moves the log-likelihood of some of the response's tokens.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from grail_lightning.credit.base import Alignment, Explained, Leaf
from grail_lightning.functional.tokens import TokenStats, full_precision, token_logprobs
from grail_lightning.policy import Policy
from grail_lightning.policy.model import left_to_run, requiring_grad
from grail_lightning.rollout import RolloutBatch, lengths_to_mask, micro_batches
from grail_lightning.seeds import preserved


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
    with explaining(policy), torch.enable_grad():
        states, activation = _forward_from_leaf(policy, batch, leaf, cut_off=True)
        return _explain(policy, batch, objective_mask, states, activation, alignment=alignment, temperature=temperature)


def forward_with_saliency(
    policy: Policy,
    batch: RolloutBatch,
    explained: Explained,
    *,
    temperature: float = 1.0,
    frozen: bool = False,
    behind: Any = None,
) -> tuple[TokenStats, Callable[[], Tensor]]:
    """`Policy.forward` with entropy, and `input_saliency` on top of the same forward pass.

    Args:
        policy: In the mode that it is in, if not `frozen`.
        batch: ``B`` rows.
        explained: Its objective ``[B, T]`` and where saliency is read; all rows are wanted.
        temperature: Divides the logits.
        frozen: Log-probabilities without gradient, in evaluation mode.
        behind: As for `Policy.forward`.

    Returns:
        Log-probabilities and entropy ``[B, T]``; and a function that gives the saliency ``[B, T]``, once. It leaves the
        graph of the log-probabilities to the caller's backward pass.
    """

    def score(states: Tensor) -> TokenStats:
        before = states[:, -batch.response_mask.shape[1] - 1 : -1]
        return policy.score(before, batch.input_ids, batch.response_mask, temperature=temperature, with_entropy=True)

    with explaining(policy) if frozen else nullcontext(), torch.enable_grad():
        states, activation = _forward_from_leaf(policy, batch, explained.leaf, cut_off=frozen, behind=behind)
        with torch.no_grad() if frozen else nullcontext():
            stats = score(states)

    def saliency() -> Tensor:
        with torch.enable_grad():
            return _explain(
                policy,
                batch,
                explained.objective,
                states,
                activation,
                alignment=explained.alignment,
                temperature=temperature,
                keep=not frozen,
            )

    return stats, saliency


def saliency_of_rows(
    policy: Policy, batch: RolloutBatch, explained: Explained, *, token_budget: int, temperature: float = 1.0
) -> Tensor:
    """`input_saliency` of some rows, each cut off behind its last masked token, in micro-batches.

    Args:
        policy: As for `input_saliency`.
        batch: ``B`` rows.
        explained: Which rows and tokens, and where it is read.
        token_budget: Most padded tokens of a micro-batch.
        temperature: As for `input_saliency`.

    Returns:
        ``[B, T]``, zero on all other rows and behind the last masked token.
    """
    ends = last_marked(explained.objective)
    short = cut_responses(batch, ends)
    objective = short.response_mask & explained.objective
    scores = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=batch.response_mask.device)
    costs = torch.stack([batch.prompt_lengths, ends], 1)
    for part in micro_batches(costs, token_budget, explained.rows.nonzero().flatten()):
        piece = short.select(part)
        columns = piece.response_mask.shape[1]
        part = part.to(scores.device)
        found = input_saliency(
            policy,
            piece,
            objective[part, :columns],
            leaf=explained.leaf,
            alignment=explained.alignment,
            temperature=temperature,
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


def _forward_from_leaf(
    policy: Policy, batch: RolloutBatch, leaf: Leaf | int, *, cut_off: bool, behind: Any = None
) -> tuple[Tensor, Tensor]:
    """The decoder's output ``[B, P+T, D]``, and the leaf ``[B, P+T, D]``; cut off, the graph starts at the leaf.

    Behind prompts that were run already both have the last ``T + 1`` columns alone.
    """
    number = block_number(leaf, len(policy.blocks))
    caught: list[Tensor] = []

    def catch(tensor: Tensor) -> Tensor:
        caught.append(tensor.detach() if cut_off else tensor)
        # A graph that begins further up (frozen weights below, as with adapters) has to begin here.
        return caught[0] if caught[0].requires_grad else caught[0].requires_grad_(True)

    def catch_states(states: Tensor) -> Tensor:
        return policy.pack(catch(policy.unpack(states, batch.attention_mask)), batch.attention_mask)

    def catch_output(module: nn.Module, args: Any, output: Any) -> Any:
        return (catch_states(output[0]), *output[1:]) if isinstance(output, tuple) else catch_states(output)

    embeds = policy.embed(left_to_run(batch.input_ids, behind))
    if number == 0:
        return policy.hidden(batch.attention_mask, embeds=catch(embeds), behind=behind), caught[0]
    hook = policy.blocks[number - 1].register_forward_hook(catch_output)
    try:
        states = policy.hidden(batch.attention_mask, embeds=embeds, behind=behind)
    finally:
        hook.remove()
    return states, caught[0]


def _explain(
    policy: Policy,
    batch: RolloutBatch,
    objective_mask: Tensor,
    states: Tensor,
    activation: Tensor,
    *,
    alignment: Alignment,
    temperature: float,
    keep: bool = False,
) -> Tensor:
    """``[B, T]``: gradient times activation at each response token; `keep` the graph for another backward pass."""
    length = batch.response_mask.shape[1]
    answer = token_logprobs(
        states[:, -length - 1 : -1][objective_mask],
        policy.head,
        batch.response_ids[objective_mask],
        temperature=temperature,
        chunk_tokens=policy.chunk_tokens,
    )
    gradient: Tensor = torch.autograd.grad(-answer.logprobs.sum(), activation, retain_graph=keep)[0]
    product = full_precision(gradient) * full_precision(activation.detach())
    score: Tensor = torch.linalg.vector_norm(product, dim=-1)
    aligned = score[:, -length - 1 : -1] if alignment == "predictor" else score[:, -length:]
    return aligned.masked_fill(~batch.response_mask, 0)


@contextmanager
def explaining(policy: Policy) -> Iterator[None]:
    """Evaluation mode (checkpointed blocks stay checkpointed) and frozen parameters, then all as it was."""
    checkpointed = [m for m in policy.modules() if getattr(m, "gradient_checkpointing", False) and m.training]
    trainable = [p for p in policy.parameters() if p.requires_grad]
    with preserved(policy.device), policy.evaluating(), requiring_grad(trainable, False):
        for module in checkpointed:
            # Transformers recomputes a block only in training mode; its children, and so its dropout, stay in eval.
            module.training = True
        yield


def last_marked(mask: Tensor) -> Tensor:
    """``[B]`` long: one more than the last True column of each row of ``[B, T]``; 0 for an empty row."""
    return (torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask).amax(1)


def cut_responses(batch: RolloutBatch, ends: Tensor) -> RolloutBatch:
    """The batch with each response ending before column `ends` ``[B]``; the columns stay."""
    kept = lengths_to_mask(ends, batch.response_mask.shape[1]) & batch.response_mask
    attention = torch.cat([batch.attention_mask[:, : batch.prompt_width], kept], 1)
    return batch.replace(response_mask=kept, attention_mask=attention)
