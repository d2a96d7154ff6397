"""OAR by perturbation (arXiv 2601.07408): the change of the answer's distribution when one token is replaced.

Shapes: ``B`` rows, ``T`` response tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch, micro_batches
from grail_lightning.batch.rows import cut_responses, last_marked
from grail_lightning.credit.base import CreditContext, TokenCredit, TokenWeights
from grail_lightning.credit.oar import (
    AnswerDistribution,
    BilevelOptions,
    answer_log_distribution,
    bilevel_weights,
    scoped_tokens,
)
from grail_lightning.credit.saliency import explaining
from grail_lightning.policy import Policy
from grail_lightning.policy.capabilities import Trunk


class OARPerturbation(TokenCredit):
    r"""Weights that grow with the change of the answer's distribution when a token becomes the pad token (OAR-P).

    .. math:: I_j = KL(p_0 \,\Vert\, p_j), \quad w = \text{bilevel}(I) \text{ on the reasoning},\ 1 \text{ elsewhere}

    This is the costly original that OAR-G approximates. It needs one forward pass for each reasoning token (those
    before the answer), in rows with a box and an advantage. The tokens before the replaced one are run once for all of
    these passes. Perturbed sequences are batched within the token budget, so that memory does not grow with the
    response. There is no gate by sign; rows without a box or an advantage have weight 1.

    Args:
        distribution: The distribution of the answer: answer_mean is the softmax of the mean logits that predict its
            tokens, last is the softmax at the last token before it, and answer_joint uses the decrease of its mean
            log-likelihood instead (a negative decrease counts as zero in the weights).
        at_temperature: Whether logits are divided by the sampling temperature; the published code does not.
        share_prefix: Whether keys and values of the tokens before the replaced one are reused from the unperturbed
            pass. Models with recurrent states cannot reuse them. False runs every sequence whole, as published.
        bilevel: Options of the map from scores to weights.

    Raises:
        ValueError: For an unknown distribution.

    Source: arXiv 2601.07408; the functions for answer_mean and answer_joint are those of OAR-G's published scorer.
    """

    def __init__(
        self,
        distribution: AnswerDistribution = "answer_mean",
        at_temperature: bool = False,
        share_prefix: bool = True,
        bilevel: BilevelOptions = BilevelOptions(),  # noqa: B008  (frozen)
    ) -> None:
        if distribution not in ("answer_mean", "last", "answer_joint"):
            raise ValueError(
                f"`distribution` must be one of answer_mean, last, answer_joint, but got {distribution!r}."
            )
        self.distribution, self.at_temperature, self.bilevel = distribution, at_temperature, bilevel
        self.share_prefix = share_prefix

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch whose advantages and answer masks are set."""
        eligible = batch.answer.whole.any(1) & (batch.advantages != 0)
        scores = perturbation_scores(
            policy,
            batch,
            eligible.nonzero().flatten(),
            token_budget=context.token_budget,
            distribution=self.distribution,
            temperature=context.temperature if self.at_temperature else 1.0,
            share_prefix=self.share_prefix,
        )
        scope = scoped_tokens(batch, batch.answer, "reasoning")
        return bilevel_weights(scores, scores.clamp(min=0), scope, eligible, batch, self.bilevel)


@torch.no_grad()
def perturbation_scores(
    policy: Policy,
    batch: RolloutBatch,
    rows: Tensor,
    *,
    token_budget: int,
    distribution: AnswerDistribution = "answer_mean",
    temperature: float = 1.0,
    share_prefix: bool = True,
) -> Tensor:
    r"""OAR-P's scores: :math:`KL(p_0 \Vert p_j)` with token ``j`` replaced by the pad token.

    Args:
        policy: The policy that gives the distributions.
        batch: The rollouts, ``B`` rows with located answers.
        rows: ``[n]`` long, the rows to compute.
        token_budget: Most padded tokens of a forward pass, reused ones included.
        distribution: The distribution of the answer; for answer_joint the score is the signed decrease of its mean
            log-likelihood.
        temperature: The number by which the logits are divided.
        share_prefix: Whether the tokens before a replaced one are run once (if the model supports it).

    Returns:
        ``[B, T]``, zero outside the reasoning and on all other rows.
    """
    scope = scoped_tokens(batch, batch.answer, "reasoning")
    target = _final(scope) if distribution == "last" else batch.answer.whole
    ends = last_marked(target)
    # Tokens after the last one whose prediction is read cannot change that prediction.
    short = cut_responses(batch.replace(answer=replace(batch.answer, whole=target)), ends)
    costs = torch.stack([batch.prompt_lengths, ends], 1)
    scores = torch.zeros(scope.shape, dtype=torch.float32, device=scope.device)
    rows = rows.to(scope.device)
    share_prefix = share_prefix and policy.supports_kv_continuation
    with explaining(policy):
        policy.eval()  # `explaining` leaves checkpointed blocks in training mode, in which they refuse a cache.
        for part in micro_batches(costs, token_budget, rows[scope[rows].any(1)]):
            clean = short.select(part)
            part = part.to(scope.device)
            trunk = Trunk(policy, clean.input_ids, clean.attention_mask) if share_prefix else None
            states = policy.hidden(clean.attention_mask, input_ids=clean.input_ids) if trunk is None else trunk.states
            reference = answer_log_distribution(policy, clean, states, distribution, temperature)
            scores = scores.to(reference.dtype)
            for k, t in _branches(scope[part], costs[part], token_budget, share_prefix):
                perturbed = _perturbed(policy, clean.select(k), t)
                states = _states(policy, clean, perturbed, trunk, k, int(t.min()))
                moved = answer_log_distribution(policy, perturbed, states, distribution, temperature)
                drop = reference[k] - moved
                scores[part[k], t] = drop if distribution == "answer_joint" else (reference[k].exp() * drop).sum(1)
    return scores


def _branches(scope: Tensor, costs: Tensor, token_budget: int, in_order: bool) -> list[tuple[Tensor, Tensor]]:
    """The scoped tokens cut into passes: the rows and columns ``[n]`` of each. If `in_order`, columns are adjacent."""
    row, column = scope.nonzero(as_tuple=True)
    if in_order:
        order = column.argsort(stable=True)
        cuts = torch.split(order, max(1, token_budget // int(costs.amax(0).sum())))
    else:
        cuts = tuple(cut.to(row.device) for cut in micro_batches(costs[row], token_budget))
    return [(row[cut], column[cut]) for cut in cuts]


def _states(
    policy: Policy, batch: RolloutBatch, perturbed: RolloutBatch, trunk: Trunk | None, rows: Tensor, first: int
) -> Tensor:
    """``[n, w, D]``: the decoder's output at the last columns, from response column `first` or an earlier one on."""
    if trunk is None:
        return policy.hidden(perturbed.attention_mask, input_ids=perturbed.input_ids)
    trimmed = batch.prompt_width - perturbed.prompt_width
    begun = perturbed.prompt_width + first
    kept = slice(trimmed, trimmed + begun)
    return trunk.branch(rows, kept, perturbed.input_ids[:, begun:], perturbed.attention_mask)


def _perturbed(policy: Policy, batch: RolloutBatch, tokens: Tensor) -> RolloutBatch:
    """The batch with one response token of each row ``[B]`` replaced by the pad token; it is still attended to."""
    ids = batch.input_ids.clone()
    ids[torch.arange(len(ids), device=ids.device), batch.prompt_width + tokens] = policy.tokenizer.pad_token_id
    return batch.replace(input_ids=ids)


def _final(mask: Tensor) -> Tensor:
    """``[B, T]`` bool: only the last True column of each row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mask & (columns == last_marked(mask)[:, None])
