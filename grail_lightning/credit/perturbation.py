"""OAR by perturbation (arXiv 2601.07408): what happens to the answer when one token is missing.

Shapes: ``B`` rows, ``T`` response tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grail_lightning.credit.base import CreditContext, TokenCredit
from grail_lightning.credit.oar import (
    AnswerDistribution,
    BilevelOptions,
    _answer_log_distribution,
    bilevel_weights,
    scoped_tokens,
)
from grail_lightning.credit.saliency import cut_responses, explaining, last_marked
from grail_lightning.policy import Policy
from grail_lightning.rollout import RolloutBatch, TokenWeights, micro_batches


class OARPerturbation(TokenCredit):
    r"""Weights by how much the answer's distribution moves when a token is replaced by the pad token (OAR-P).

    .. math:: I_j = KL(p_0 \,\Vert\, p_j), \quad w = \text{bilevel}(I) \text{ on the reasoning},\ 1 \text{ elsewhere}

    One forward pass for each reasoning token (those before the answer), of rows with a box and an advantage alone: the
    costly original that OAR-G approximates. Perturbed sequences are batched within the token budget, so that memory
    does not grow with the response. There is no gate by sign; rows without a box or an advantage have weight 1.

    Args:
        distribution: Of the answer: answer_mean is the softmax of the mean logits that predict its tokens, last the
            softmax at the last token before it, answer_joint stands for the drop of its mean log-likelihood (a drop
            below zero counts as zero in the weights).
        at_temperature: Whether logits are divided by the sampling temperature; the published code does not.
        bilevel: From scores to weights.

    Raises:
        ValueError: For an unknown distribution.

    Source: arXiv 2601.07408; its helpers for answer_mean and answer_joint are those of OAR-G's published scorer.
    """

    def __init__(
        self,
        distribution: AnswerDistribution = "answer_mean",
        at_temperature: bool = False,
        bilevel: BilevelOptions = BilevelOptions(),  # noqa: B008  (frozen)
    ) -> None:
        if distribution not in ("answer_mean", "last", "answer_joint"):
            raise ValueError(
                f"`distribution` must be one of answer_mean, last, answer_joint, but got {distribution!r}."
            )
        self.distribution, self.at_temperature, self.bilevel = distribution, at_temperature, bilevel

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch whose advantages and answer masks are set."""
        assert batch.advantages is not None
        assert batch.answer is not None
        eligible = batch.answer.whole.any(1) & (batch.advantages != 0)
        scores = perturbation_scores(
            policy,
            batch,
            eligible.nonzero().flatten(),
            token_budget=context.token_budget,
            distribution=self.distribution,
            temperature=context.temperature if self.at_temperature else 1.0,
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
) -> Tensor:
    r"""OAR-P's scores: :math:`KL(p_0 \Vert p_j)` with token ``j`` replaced by the pad token.

    Args:
        policy: Answers for the distributions.
        batch: ``B`` rows with located answers.
        rows: ``[n]`` long, the rows to compute.
        token_budget: Most padded tokens of a forward pass.
        distribution: Of the answer; for answer_joint the score is the signed drop of its mean log-likelihood.
        temperature: Divides the logits.

    Returns:
        ``[B, T]``, zero outside the reasoning and on all other rows.
    """
    assert batch.answer is not None
    scope = scoped_tokens(batch, batch.answer, "reasoning")
    target = _final(scope) if distribution == "last" else batch.answer.whole
    ends = last_marked(target)
    # What is behind the tokens whose prediction is read cannot change it.
    short = cut_responses(batch.replace(answer=replace(batch.answer, whole=target)), ends)
    costs = torch.stack([batch.prompt_lengths, ends], 1)
    scores = torch.zeros(scope.shape, dtype=torch.float32, device=scope.device)
    rows = rows.to(scope.device)
    with explaining(policy):
        for part in micro_batches(costs, token_budget, rows[scope[rows].any(1)]):
            piece = short.select(part)
            clean = policy.embed(piece.input_ids)
            reference = _answer_log_distribution(policy, piece, clean, distribution, temperature)
            scores = scores.to(reference.dtype)
            part = part.to(scope.device)
            # One entry a reasoning token: its row within `piece`, and its column.
            row, column = scope[part].nonzero(as_tuple=True)
            for some in micro_batches(costs[part][row], token_budget):
                k, t = row[some.to(row.device)], column[some.to(row.device)]
                perturbed = _perturbed(policy, piece.select(k), t)
                embeds = policy.embed(perturbed.input_ids)
                moved = _answer_log_distribution(policy, perturbed, embeds, distribution, temperature)
                drop = reference[k] - moved
                scores[part[k], t] = drop if distribution == "answer_joint" else (reference[k].exp() * drop).sum(1)
    return scores


def _perturbed(policy: Policy, batch: RolloutBatch, tokens: Tensor) -> RolloutBatch:
    """The batch with one response token of each row ``[B]`` replaced by the pad token; it is still attended to."""
    ids = batch.input_ids.clone()
    ids[torch.arange(len(ids), device=ids.device), batch.prompt_width + tokens] = policy.tokenizer.pad_token_id
    return batch.replace(input_ids=ids)


def _final(mask: Tensor) -> Tensor:
    """``[B, T]`` bool: the last True column of each row alone."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mask & (columns == last_marked(mask)[:, None])
