"""The information gain of turns as their credit: `IGPO`.

Shapes: ``B`` rows, ``T`` response tokens, ``K`` turns of the row that has the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grail_lightning.core.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.core.credit.measure import logprobs
from grail_lightning.core.credit.turns import TurnTable, turn_beginnings, turn_table
from grail_lightning.core.functional.advantages import discounted_returns, relative, spread_turns
from grail_lightning.core.functional.tokens import masked_mean
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch, lengths_to_mask, pad_left
from grail_lightning.core.runtime.checks import check_options

_Normalise = Literal["joint", "separate"]


@dataclass(eq=False)
class IGPO(TokenCredit):
    r"""Rewards a turn for the rise of the probability that the policy gives to the reference answer.

    .. math:: A_{it} = \sum_{l \ge k} \gamma^{l-k}\, \mathrm{norm}(r_{il}), \qquad r_{ik} = p_{i,k+1} - p_{ik}, \qquad
              p_{ik} = \exp\Bigl(\frac{1}{|a|} \sum_j \log \pi(a_j \mid \text{ids before turn } k, \text{lead},
              a_{<j})\Bigr)

    Token ``t`` is of turn ``k``. The reward of the last turn is that of the rollout. Rewards are normalised over the
    turns of the group. This is the whole advantage: `model.advantage` is refused. It
    takes one forward pass over what came before each turn, of rollouts with several turns. Rollouts without a
    reference answer keep their advantage and count as fallbacks. Without turns a rollout is one turn: the normalised
    reward.

    Args:
        discount: γ, of a turn.
        normalise: The statistics of outcomes and gains: `joint`, or `separate`.
        standardise: Whether the normalised reward is divided by the unbiased standard deviation + 1e-4.
        lead: The text between what came before the turn and the answer. Both are tokenised by themselves.

    Source: IGPO, arXiv 2510.14967 (probabilities, joint), and its published code, whose script takes log-probabilities,
    separate statistics and ``γ = 1``, leaves out gains of exactly 0, and divides by the population's deviation + 1e-6.
    """

    replaces_advantage = True
    reads_reference = True

    discount: float = 1.0
    normalise: _Normalise = "joint"
    standardise: bool = True
    lead: str = "<answer>"

    def __post_init__(self) -> None:
        check_options(self, discount="[0, 1]", normalise=_Normalise)

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 0, and the advantages as an additive stage; rows that fall back keep their advantage."""
        turns = turn_table(batch)
        has_belief, belief = self._belief(policy, batch, context, turns)
        fallback = turns.exists[:, 1:].any(1) & ~has_belief
        counted = turns.exists & ~fallback[:, None]
        gains = (belief.roll(-1, 1) - belief) * (has_belief[:, None] & counted & ~turns.last)
        rewards = torch.where(turns.last, batch.rewards.double()[:, None], gains)
        key = batch.group[:, None] * 2 + turns.last * (self.normalise == "separate")
        normalised = relative(rewards, key, counted, standardise=self.standardise)
        advantages = discounted_returns(normalised, self.discount)
        return TokenWeights.whole(
            spread_turns(advantages, turns.numbers).to(batch.advantages.dtype),
            batch.response_mask,
            fallback=fallback,
            metrics={"information_gain": Mean.over(gains, counted & ~turns.last)},
        )

    def _belief(
        self, policy: Policy, batch: RolloutBatch, context: CreditContext, turns: TurnTable
    ) -> tuple[Tensor, Tensor]:
        """``[B]`` bool: rows with a reference answer; and ``[B, K]`` float64: ``p`` at the beginning of each turn.

        It is 0 in rows of one turn, which need none.
        """
        lead, *answers = [
            list(policy.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
            for text in (self.lead, *(prompt.reference for prompt in batch.prompts))
        ]
        several = turns.exists & turns.exists[:, 1:].any(1, keepdim=True)
        places = [(row, k) for row, k in several.nonzero().tolist() if answers[row]]
        ids = turn_beginnings(batch, turns)
        # One more row, of any content: a rank without a place joins the passes of the others with it.
        filler = ids[0][0][:1].tolist()
        before = [*(ids[row][k].tolist() + lead for row, k in places), filler]
        after = [torch.tensor(answer) for answer in (*(answers[row] for row, _ in places), filler)]
        belief_batch = _as_batch(policy, batch, before, after, [*(row for row, _ in places), 0])
        logps = logprobs(policy, belief_batch, context, torch.arange(len(places))).double()
        means = masked_mean(logps, belief_batch.response_mask, 1)[:-1]
        belief = torch.zeros(several.shape, dtype=torch.float64, device=logps.device)
        if places:
            rows, numbers = torch.tensor(places, device=logps.device).T
            belief[rows, numbers] = means.exp()
        return torch.tensor([bool(ids) for ids in answers], device=logps.device), belief


def _as_batch(
    policy: Policy, batch: RolloutBatch, before: list[list[int]], after: list[Tensor], rows: list[int]
) -> RolloutBatch:
    """Ids before an answer as prompts, and its ids as responses, in the groups of the given rows of the batch."""
    prompt_ids, prompt_mask = pad_left(before, policy.tokenizer.pad_token_id)
    ids = pad_sequence(after, batch_first=True)
    mask = lengths_to_mask(torch.tensor([len(answer) for answer in after]), ids.shape[1])
    device = batch.input_ids.device
    return batch.select(torch.tensor(rows)).replace(
        input_ids=torch.cat([prompt_ids, ids], 1).int().to(device),
        attention_mask=torch.cat([prompt_mask, mask], 1).to(device),
        response_ids=ids.int().to(device),
        response_mask=mask.to(device),
        row=torch.arange(len(rows), device=device),
        turn=None,
        episodes=None,
    )
