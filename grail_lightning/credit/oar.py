"""OAR: outcome-grounded advantage reshaping (arXiv 2601.07408), approximated by one gradient.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.batch import AnswerMasks, RolloutBatch, micro_batches
from grail_lightning.batch.rows import cut_responses, last_marked
from grail_lightning.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.credit.saliency import explaining
from grail_lightning.functional import bilevel_map, token_logprobs
from grail_lightning.functional.tokens import full_precision
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import Alignment

AnswerDistribution = Literal["answer_mean", "last", "answer_joint"]
Scope = Literal["reasoning", "response"]


@dataclass(frozen=True, kw_only=True)
class BilevelOptions:
    """Options of the map from scores to weights; see `grail_lightning.functional.bilevel_map`.

    Attributes:
        quantile: Scores below this quantile are damped, the others boosted.
        boost: The highest score has weight 1 + boost, before rescaling.
        floor: Least weight, before rescaling.
        interpolate: Whether the quantile interpolates; false takes sorted[floor(quantile * length)].
        preserve_mass: Whether each row's weights are rescaled to sum to its number of weighted tokens.
        eps: A small number that keeps the divisions finite.
    """

    quantile: float = 0.4
    boost: float = 2.0
    floor: float = 0.1
    interpolate: bool = True
    preserve_mass: bool = True
    eps: float = 1e-8


class OARGradient(TokenCredit):
    r"""Weights that grow with the effect of each position on the answer's distribution, to first order (OAR-G).

    .. math:: J = KL(p_0 \,\Vert\, p_{e+\epsilon}), \quad \epsilon \sim N(0, \sigma^2), \quad
              I_j = \left|\sum_d \frac{\partial J}{\partial e_{jd}} e_{jd}\right|, \quad w = \text{bilevel}(I)

    Without noise the gradient of the KL is zero. The defaults are those of the OAR code. The re-implementation in the
    GRAIL repository is ``scope: response, alignment: predictor, product: noisy`` with ``interpolate: false`` and
    ``eps: 1e-12`` in `bilevel`. There is no gate by sign; rows without a box or an advantage have weight 1.

    Args:
        distribution: The distribution of the answer: answer_mean is the softmax of the mean logits that predict its
            tokens, last is the softmax at its last token, and answer_joint uses the decrease of its mean log-likelihood
            instead.
        scope: The tokens that are perturbed and weighted: reasoning (before the answer), or the whole response.
        alignment: The position that is read for a token: token is its own, predictor the one before it.
        product: Whether the gradient is multiplied with the clean or the noisy embedding.
        noise: Standard deviation σ of the noise on the embeddings.
        at_temperature: Whether logits are divided by the sampling temperature; the published code does not.
        bilevel: Options of the map from scores to weights.

    Raises:
        ValueError: For noise that is not positive or an unknown name.

    Source: arXiv 2601.07408 and its published scorer.
    """

    def __init__(
        self,
        distribution: AnswerDistribution = "answer_mean",
        scope: Scope = "reasoning",
        alignment: Alignment = "token",
        product: Literal["clean", "noisy"] = "clean",
        noise: float = 1e-3,
        at_temperature: bool = False,
        bilevel: BilevelOptions = BilevelOptions(),
    ) -> None:
        if noise <= 0:
            raise ValueError(
                f"`noise` must be positive, but got {noise}. Without noise the gradient of the KL is zero."
            )
        for name, value, known in (
            ("distribution", distribution, ("answer_mean", "last", "answer_joint")),
            ("scope", scope, ("reasoning", "response")),
            ("alignment", alignment, ("token", "predictor")),
            ("product", product, ("clean", "noisy")),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, but got {value!r}.")
        self.distribution, self.scope, self.alignment, self.product = distribution, scope, alignment, product
        self.noise, self.at_temperature, self.bilevel = noise, at_temperature, bilevel

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch whose advantages and answer masks are set."""
        eligible = batch.answer.whole.any(1) & (batch.advantages != 0)
        scores = self._scores_of_rows(policy, batch, eligible.nonzero().flatten(), context)
        scope = scoped_tokens(batch, batch.answer, self.scope)
        return bilevel_weights(scores, scores, scope, eligible, batch, self.bilevel)

    def _scores_of_rows(self, policy: Policy, batch: RolloutBatch, rows: Tensor, context: CreditContext) -> Tensor:
        # Later tokens have no score: the last one is the answer's last token. If the distribution is read there and
        # tokens read the position before them, the token after it has a score, too.
        beyond = self.distribution == "last" and self.alignment == "predictor"
        ends = (last_marked(batch.answer.whole) + beyond).minimum(batch.response_lengths)
        short = cut_responses(batch, ends)
        scores = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=batch.response_mask.device)
        for part in micro_batches(torch.stack([batch.prompt_lengths, ends], 1), context.token_budget, rows):
            micro_batch = short.select(part)
            noise = self.draw_noise(policy, micro_batch, context)
            found = gradient_scores(
                policy,
                micro_batch,
                noise,
                distribution=self.distribution,
                alignment=self.alignment,
                product=self.product,
                temperature=context.temperature if self.at_temperature else 1.0,
            )
            scores = scores.to(found.dtype)
            scores[part.to(scores.device), : found.shape[1]] = found
        return scores

    def draw_noise(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
        """``[B, P+T, D]``, zero outside the positions of the scoped tokens; keyed by row and independent of padding."""
        width = policy.model.get_input_embeddings().weight.shape[1]
        noise = torch.zeros(*batch.input_ids.shape, width, dtype=policy.model.dtype)
        scope = scoped_tokens(batch, batch.answer, self.scope).cpu()
        shift = batch.prompt_width - (self.alignment == "predictor")
        for k, row in enumerate(batch.row.tolist()):
            places = scope[k].nonzero().flatten() + shift
            drawn = torch.randn(len(places), width, generator=context.row_generator(row), dtype=torch.float32)
            noise[k, places] = (self.noise * drawn).to(noise.dtype)
        return noise.to(batch.input_ids.device)


def gradient_scores(
    policy: Policy,
    batch: RolloutBatch,
    noise: Tensor,
    *,
    distribution: AnswerDistribution = "answer_mean",
    alignment: Alignment = "token",
    product: Literal["clean", "noisy"] = "clean",
    temperature: float = 1.0,
) -> Tensor:
    """OAR-G's scores under given noise: ``|Σ_d g_d·e_d|`` at each response token.

    Args:
        policy: The policy that gives the distributions.
        batch: The rollouts, ``B`` rows, each with an answer.
        noise: ``[B, P+T, D]``, added to the embeddings.
        distribution: The distribution of the answer (`OARGradient`).
        alignment: The position that is read for a token.
        product: Whether the gradient is multiplied with the clean or the noisy embedding.
        temperature: The number by which the logits are divided.

    Returns:
        ``[B, T]``, zero outside the response mask.
    """
    length = batch.response_mask.shape[1]
    clean = policy.embed(batch.input_ids).detach()
    with explaining(policy):
        with torch.no_grad():
            states = policy.hidden(batch.attention_mask, embeds=clean)
            reference = answer_log_distribution(policy, batch, states, distribution, temperature)
        with torch.enable_grad():
            noisy = (clean + noise.to(clean.dtype)).requires_grad_(True)
            states = policy.hidden(batch.attention_mask, embeds=noisy)
            moved = answer_log_distribution(policy, batch, states, distribution, temperature)
            if distribution == "answer_joint":
                objective = (reference - moved).sum()
            else:
                objective = (reference.exp() * (reference - moved)).sum()
            gradient = torch.autograd.grad(objective, noisy)[0]
    factor = clean if product == "clean" else noisy.detach()
    score = (full_precision(gradient) * full_precision(factor)).sum(-1).abs()
    aligned = score[:, -length - 1 : -1] if alignment == "predictor" else score[:, -length:]
    return aligned.masked_fill(~batch.response_mask, 0)


def bilevel_weights(
    scores: Tensor, mapped_scores: Tensor, scope: Tensor, eligible: Tensor, batch: RolloutBatch, options: BilevelOptions
) -> TokenWeights:
    """The bi-level map on the scoped tokens of eligible rows, weight 1 on all other response tokens.

    Args:
        scores: ``[B, T]``, the scores to report.
        mapped_scores: ``[B, T]``, the scores to map, not negative.
        scope: ``[B, T]`` bool, the tokens that are weighted.
        eligible: ``[B]`` bool, the rows that were scored.
        batch: The rollouts, with answer masks.
        options: The options of the map.
    """
    mapped = bilevel_map(mapped_scores, scope, **asdict(options))
    return TokenWeights(
        values=torch.where(scope & eligible[:, None], mapped, batch.response_mask.to(mapped.dtype)),
        scores=scores,
        fallback=~batch.answer.whole.any(1),
        metrics={"eligible": Mean(eligible.sum().item(), len(eligible))},
    )


def scoped_tokens(batch: RolloutBatch, answer: AnswerMasks, scope: Scope) -> Tensor:
    """``[B, T]`` bool: the whole response, or the tokens before the answer (none without an answer)."""
    if scope == "response":
        return batch.response_mask
    begun = answer.whole.long().cumsum(1) > 0
    return batch.response_mask & ~begun & answer.whole.any(1, keepdim=True)


def answer_log_distribution(
    policy: Policy, batch: RolloutBatch, states: Tensor, distribution: AnswerDistribution, temperature: float
) -> Tensor:
    """Log-probabilities ``[B, V]`` of the answer's distribution, or one log-likelihood of the answer a row ``[B]``.

    Besides the result, logits exist for `Loading.chunk_tokens` positions at one time.

    Args:
        policy: The policy that gives the logits.
        batch: The rollouts, ``B`` rows, each with an answer.
        states: ``[B, W, D]``, the decoder's output at the last ``W`` columns, which include the answer's predictors.
        distribution: answer_mean or last; answer_joint gives the mean log-likelihood of the answer's tokens.
        temperature: The number by which the logits are divided.
    """
    length = batch.response_mask.shape[1]
    if distribution == "last":
        last = last_marked(batch.answer.whole) - 1 + states.shape[1] - length
        logits = policy.head(states[torch.arange(len(batch), device=last.device), last])
        return full_precision(logits).div(temperature).log_softmax(-1)
    known = min(states.shape[1] - 1, length)
    whole = batch.answer.whole[:, -known:]
    before, rows, counts = states[:, -known - 1 : -1][whole], whole.nonzero()[:, 0], whole.sum(1).clamp(min=1)
    chunk = policy.chunk_tokens
    if distribution == "answer_joint":
        ids = batch.response_ids[:, -known:][whole]
        chosen = token_logprobs(before, policy.head, ids, temperature=temperature, chunk_tokens=chunk).logprobs
        return chosen.new_zeros(len(batch)).index_add(0, rows, chosen) / counts
    sums: Tensor | None = None
    for part, owner in zip(torch.split(before, chunk), torch.split(rows, chunk), strict=True):
        logits = full_precision(policy.head(part)) / temperature
        sums = logits.new_zeros(len(batch), logits.shape[-1]) if sums is None else sums
        sums = sums.index_add(0, owner, logits)
    assert sums is not None
    return (sums / counts[:, None]).log_softmax(-1)
