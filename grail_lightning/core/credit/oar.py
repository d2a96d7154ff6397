"""OAR: outcome-grounded advantage reshaping (arXiv 2601.07408), by one gradient or by a perturbation of each token.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from grail_lightning.core.credit.base import CreditContext, Mean, TokenCredit, TokenWeights, one_elsewhere
from grail_lightning.core.credit.saliency import explaining
from grail_lightning.core.functional.tokens import full_precision, token_logprobs
from grail_lightning.core.functional.weighting import bilevel_map
from grail_lightning.core.policy.capabilities import Trunk
from grail_lightning.core.policy.layout import ReadAt
from grail_lightning.core.policy.micro_batch import scatter, zero_table
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch, cut_responses, last_marked, micro_batches
from grail_lightning.core.runtime.checks import check_options

_AnswerDistribution = Literal["answer_mean", "last", "answer_joint"]
_Scope = Literal["reasoning", "response"]
_Factor = Literal["clean", "noisy"]


@dataclass(frozen=True, kw_only=True)
class BilevelOptions:
    """Options of the map from scores to weights; see `grail_lightning.functional.bilevel_map`.

    Attributes:
        quantile: Scores below this quantile are damped, the others boosted.
        boost: The highest score has weight 1 + boost, before rescaling.
        floor: Least weight, before rescaling.
        interpolate: Whether the quantile interpolates; false takes sorted[floor(quantile * length)].
        eps: A small number that keeps the divisions finite.
    """

    quantile: float = 0.4
    boost: float = 2.0
    floor: float = 0.1
    interpolate: bool = True
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_options(self, quantile="[0, 1)", boost="[0, inf)", floor="[0, 1]", eps="(0, inf)")


@dataclass(eq=False)
class OARGradient(TokenCredit):
    r"""Weights that grow with the effect of each position on the answer's distribution, to first order (OAR-G).

    .. math:: J = KL(p_0 \,\Vert\, p_{e+\epsilon}), \quad \epsilon \sim N(0, \sigma^2), \quad
              I_j = \left|\sum_d \frac{\partial J}{\partial e_{jd}} e_{jd}\right|, \quad w = \text{bilevel}(I)

    Without noise the gradient of the KL is zero. The defaults are those of the OAR code. The re-implementation in the
    GRAIL repository is ``scope: response, read_at: predictor, product: noisy`` with ``interpolate: false`` and
    ``eps: 1e-12`` in `bilevel`. There is no gate by sign; rows without a box or an advantage have weight 1.

    Args:
        distribution: The distribution of the answer: answer_mean is the softmax of the mean logits that predict its
            tokens, last is the softmax at its last token, and answer_joint uses the decrease of its mean log-likelihood
            instead.
        scope: The tokens that are perturbed and weighted: reasoning (before the answer), or the whole response.
        read_at: The position that is read for a token: token is its own, predictor the one before it.
        product: Whether the gradient is multiplied with the clean or the noisy embedding.
        noise: Standard deviation σ of the noise on the embeddings.
        at_temperature: Whether logits are divided by the sampling temperature; the published code does not.
        bilevel: Options of the map from scores to weights.

    Source: arXiv 2601.07408 and its published scorer.
    """

    distribution: _AnswerDistribution = "answer_mean"
    scope: _Scope = "reasoning"
    read_at: ReadAt = "token"
    product: _Factor = "clean"
    noise: float = 1e-3
    at_temperature: bool = False
    bilevel: BilevelOptions = BilevelOptions()

    def __post_init__(self) -> None:
        check_options(self, distribution=_AnswerDistribution, scope=_Scope, read_at=ReadAt, product=_Factor)
        check_options(self, noise="(0, inf)")  # Without noise the gradient of the KL is zero.

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from one gradient."""
        # Tokens after the answer have no score, except the first if the distribution is read at the answer's last token
        # and tokens read the position before them.
        beyond = self.distribution == "last" and self.read_at == "predictor"
        ends = (last_marked(batch.answer.whole) + beyond).minimum(batch.valid_lengths)
        short, scores = cut_responses(batch, ends), zero_table(policy, batch)
        costs, rows = torch.stack([batch.prompt_lengths, ends], 1), _eligible(batch).nonzero().flatten()
        for part in micro_batches(costs, context.token_budget, rows):
            micro_batch = short.select(part)
            noise = self.draw_noise(policy, micro_batch, context)
            scatter(scores, part, self.gradient_scores(policy, micro_batch, noise, context))
        return _bilevel_weights(scores, scoped_tokens(batch, self.scope), batch, self.bilevel)

    def draw_noise(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
        """``[B, P+T, D]``, zero outside the positions of the scoped tokens; keyed by row and independent of padding."""
        width = policy.model.get_input_embeddings().weight.shape[1]
        noise = torch.zeros(*batch.input_ids.shape, width, dtype=policy.model.dtype)
        scope = scoped_tokens(batch, self.scope).cpu()
        shift = batch.prompt_width - (self.read_at == "predictor")
        for k, row in enumerate(batch.row.tolist()):
            places = scope[k].nonzero().flatten() + shift
            drawn = torch.randn(len(places), width, generator=context.row_generator(row), dtype=torch.float32)
            noise[k, places] = (self.noise * drawn).to(noise.dtype)
        return noise.to(batch.input_ids.device)

    def gradient_scores(self, policy: Policy, batch: RolloutBatch, noise: Tensor, context: CreditContext) -> Tensor:
        """``[B, T]``: ``|Σ_d g_d·e_d|`` under given noise ``[B, P+T, D]``. Every row must have an answer."""
        length = batch.response_mask.shape[1]
        clean = policy.embed(batch.input_ids).detach()

        def answer(embeds: Tensor) -> Tensor:
            return _answer_distribution(
                self, policy, batch, policy.hidden(batch.attention_mask, batch.input_ids, embeds=embeds), context
            )

        with explaining(policy):
            with torch.no_grad():
                reference = answer(clean)
            with torch.enable_grad():
                noisy = (clean + noise.to(clean.dtype)).requires_grad_(True)
                divergence = _divergence(reference, answer(noisy)).sum()
                gradient = torch.autograd.grad(divergence, noisy)[0]
        factor = clean if self.product == "clean" else noisy.detach()
        score = (full_precision(gradient) * full_precision(factor)).sum(-1).abs()
        aligned = score[:, -length - 1 : -1] if self.read_at == "predictor" else score[:, -length:]
        return aligned.masked_fill(~batch.response_mask, 0)


def _eligible(batch: RolloutBatch) -> Tensor:
    return batch.answer.whole.any(1) & (batch.advantages != 0)


def _bilevel_weights(scores: Tensor, scope: Tensor, batch: RolloutBatch, options: BilevelOptions) -> TokenWeights:
    """The bi-level map of scores on the scoped tokens of eligible rows; weight 1 on other response tokens."""
    eligible = _eligible(batch)
    # Scores below 0, which answer_joint has, count as 0 in the weights.
    mapped = bilevel_map(scores.clamp(min=0), scope, **asdict(options))
    return TokenWeights(
        values=one_elsewhere(mapped, scope & eligible[:, None], batch.response_mask),
        scores=scores,
        fallback=~batch.answer.whole.any(1),
        metrics={"eligible": Mean.share(eligible)},
    )


def scoped_tokens(batch: RolloutBatch, scope: _Scope) -> Tensor:
    """``[B, T]`` bool: the whole response, or the tokens before the answer (none without an answer)."""
    if scope == "response":
        return batch.response_mask
    whole = batch.answer.whole
    return batch.response_mask & ~_begun(whole) & whole.any(1, keepdim=True)


def _begun(whole: Tensor) -> Tensor:
    """``[B, T]`` bool: the columns from the answer's first token on."""
    return whole.long().cumsum(1) > 0


def _answer_distribution(
    method: OARGradient | OARPerturbation, policy: Policy, batch: RolloutBatch, states: Tensor, context: CreditContext
) -> Tensor:
    """Log-probabilities ``[B, V]`` of the answer's distribution, or one log-likelihood of the answer a row ``[B]``.

    `states` ``[B, W, D]`` are the decoder's output at the last ``W`` columns, which include the answer's predictors.
    Besides the result, logits exist for `Loading.chunk_tokens` positions at one time.
    """
    length = batch.response_mask.shape[1]
    temperature = context.temperature if method.at_temperature else 1.0
    if method.distribution == "last":
        last = last_marked(batch.answer.whole) - 1 + states.shape[1] - length
        logits = policy.head(states[torch.arange(len(batch), device=last.device), last])
        return full_precision(logits).div(temperature).log_softmax(-1)
    num_states = min(states.shape[1] - 1, length)
    whole = batch.answer.whole[:, -num_states:]
    before, rows, counts = states[:, -num_states - 1 : -1][whole], whole.nonzero()[:, 0], whole.sum(1).clamp(min=1)
    chunk = policy.chunk_tokens
    if method.distribution == "answer_joint":
        ids = batch.response_ids[:, -num_states:][whole]
        chosen = token_logprobs(before, policy.head, ids, temperature=temperature, chunk_tokens=chunk)
        return chosen.new_zeros(len(batch)).index_add(0, rows, chosen) / counts
    sums: Tensor | None = None
    for part, owner in zip(torch.split(before, chunk), torch.split(rows, chunk), strict=True):
        logits = full_precision(policy.head(part)) / temperature
        sums = logits.new_zeros(len(batch), logits.shape[-1]) if sums is None else sums
        sums = sums.index_add(0, owner, logits)
    assert sums is not None
    return (sums / counts[:, None]).log_softmax(-1)


def _divergence(reference: Tensor, moved: Tensor) -> Tensor:
    """``[B]``: the KL of two answer distributions ``[B, V]``, or the decrease of a log-likelihood ``[B]``."""
    drop = reference - moved
    return drop if drop.dim() == 1 else (reference.exp() * drop).sum(1)


@dataclass(eq=False)
class OARPerturbation(TokenCredit):
    r"""Weights that grow with the change of the answer's distribution when a token becomes the pad token (OAR-P).

    .. math:: I_j = KL(p_0 \,\Vert\, p_j), \quad w = \text{bilevel}(I) \text{ on the reasoning},\ 1 \text{ elsewhere}

    This is the costly original that OAR-G approximates. It needs one forward pass for each reasoning token (those
    before the answer), in rows with a box and an advantage. The tokens before the replaced one are run once for all of
    these passes, except by models with recurrent states. There is no gate by sign; rows without a box or an advantage
    have weight 1.

    Args:
        distribution: The distribution of the answer: answer_mean is the softmax of the mean logits that predict its
            tokens, last is the softmax at the last token before it, and answer_joint uses the decrease of its mean
            log-likelihood instead (a negative decrease counts as zero in the weights).
        at_temperature: Whether logits are divided by the sampling temperature; the published code does not.
        bilevel: Options of the map from scores to weights.

    Source: arXiv 2601.07408; the functions for answer_mean and answer_joint are those of OAR-G's published scorer.
    """

    distribution: _AnswerDistribution = "answer_mean"
    at_temperature: bool = False
    bilevel: BilevelOptions = BilevelOptions()

    def __post_init__(self) -> None:
        check_options(self, distribution=_AnswerDistribution)

    @torch.no_grad()
    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from a forward pass for each token."""
        scope = scoped_tokens(batch, "reasoning")
        target = batch.answer.whole
        if self.distribution == "last":  # The token before the answer, sampled or not.
            target = F.pad(_begun(target)[:, 1:], (0, 1)) & ~_begun(target)
        ends = last_marked(target)
        # Tokens after the last one whose prediction is read cannot change that prediction.
        short = cut_responses(batch.replace(answer=replace(batch.answer, whole=target)), ends)
        costs = torch.stack([batch.prompt_lengths, ends], 1)
        scores = zero_table(policy, batch)
        rows = (_eligible(batch) & scope.any(1)).nonzero().flatten()
        share = policy.supports_kv_continuation
        with explaining(policy):
            policy.eval()  # `explaining` leaves checkpointed blocks in training mode, in which they refuse a cache.
            for part in micro_batches(costs, context.token_budget, rows):
                clean = short.select(part)
                part = part.to(scope.device)
                trunk = Trunk(policy, clean.input_ids, clean.attention_mask) if share else None
                states = trunk.states if trunk else policy.hidden(clean.attention_mask, clean.input_ids)
                reference = _answer_distribution(self, policy, clean, states, context)
                for k, t in _branches(scope[part], costs[part], context.token_budget, share):
                    perturbed = _perturbed(policy, clean.select(k), t)
                    if trunk:  # The columns from the first replaced token on.
                        begun = perturbed.prompt_width + int(t.min())
                        trimmed = clean.prompt_width - perturbed.prompt_width
                        columns = slice(trimmed, trimmed + begun)
                        states = trunk.branch(k, columns, perturbed.input_ids[:, begun:], perturbed.attention_mask)
                    else:
                        states = policy.hidden(perturbed.attention_mask, perturbed.input_ids)
                    moved = _answer_distribution(self, policy, perturbed, states, context)
                    scores[part[k], t] = _divergence(reference[k], moved)
        return _bilevel_weights(scores, scope, batch, self.bilevel)


def _branches(scope: Tensor, costs: Tensor, token_budget: int, in_order: bool) -> list[tuple[Tensor, Tensor]]:
    """The scoped tokens cut into passes: the rows and columns ``[n]`` of each. If `in_order`, columns are adjacent."""
    row, column = scope.nonzero(as_tuple=True)
    if in_order:
        order = column.argsort(stable=True)
        cuts = torch.split(order, max(1, token_budget // int(costs.amax(0).sum())))
    else:
        cuts = tuple(cut.to(row.device) for cut in micro_batches(costs[row], token_budget))
    return [(row[cut], column[cut]) for cut in cuts]


def _perturbed(policy: Policy, batch: RolloutBatch, tokens: Tensor) -> RolloutBatch:
    """The batch with one response token of each row ``[B]`` replaced by the pad token; it is still attended to."""
    ids = batch.input_ids.clone()
    ids[torch.arange(len(ids), device=ids.device), batch.prompt_width + tokens] = policy.tokenizer.pad_token_id
    return batch.replace(input_ids=ids)
