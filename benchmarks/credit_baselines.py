"""The lines of the tables `baselines` and `shares` of credit_gradients.py, with credit that the package does not have.

It is no script; benchmarks/study_instruments.yaml uses its classes, too. The whole advantage of each class but
`PromptWeights` is its additive stage. Groups whose rewards are equal have none, except with resampled values.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from credit_subjects import Subject, subjects
from credit_values import choices
from torch import Tensor

from grail_lightning import EnergyBaseline, GroupMean, Policy, RolloutBatch, credit
from grail_lightning.core.credit.measure import gradient_energies
from grail_lightning.core.credit.tree import prefix_path
from grail_lightning.core.functional.states import state_values
from grail_lightning.credit import CreditContext, SampledContinuations, TokenCredit, TokenWeights, TreeAdvantage
from grail_lightning.gallery.continuations import Prefix

Kind = Literal["position", "row", "tree"]
_EPS = 1e-8
_BUDGET = 10**9  # Tokens of continuations: no place is left out.


def in_live_groups(batch: RolloutBatch) -> Tensor:
    """``[B]`` bool: rows of groups whose rewards differ."""
    return torch.isin(batch.group, batch.group[batch.advantages != 0])


class LeftOut(TokenCredit):
    r"""A baseline from the *other* rows of the group, so that it is no function of the row itself: no bias.

    - ``position``: ``B_t = Σ_j W_jt r_j / Σ_j W_jt``, ``W`` the gradient energy up to ``t``: `OptimalBaseline`.
    - ``row``: the same with the energy of the whole row: one baseline a row.
    - ``tree``: the mean reward of the rows that share the prefix, shrunk to that of the state before by one row.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        mask, rewards = batch.response_mask, batch.rewards.double()
        live = in_live_groups(batch)
        same = (batch.group[:, None] == batch.group).double()
        others = same - torch.eye(len(batch), dtype=torch.float64)
        mean = (others @ rewards) / others.sum(1).clamp(min=1)
        if self.kind == "tree":
            baseline = state_values(prefix_path(batch), rewards, own_row=False)[0][:, :-1]
        else:
            energy = (gradient_energies(policy, batch, context, live.nonzero().flatten()) + _EPS) * mask
            if self.kind == "position":
                weight = energy.cumsum(1) * mask
            else:
                weight = energy.sum(1, keepdim=True).expand(mask.shape)
            total = others @ weight
            baseline = torch.where(total > 0, (others @ (weight * rewards[:, None])) / total, mean[:, None])
        return added((rewards[:, None] - baseline) * mask * live[:, None], batch)


class TreeAndEnergies(TokenCredit):
    r"""The return less a share of a baseline of the state before each token: the tree and least noise together.

    .. math:: A_{it} = r_i - c\, b(s_{t-1})

    ``b`` is the mean reward of the group's rows with this prefix, the row itself included, each weighted by its
    gradient energy from there on, and shrunk to the baseline of the state before by the weight of one row.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        mask, rewards = batch.response_mask, batch.rewards.double()
        live = in_live_groups(batch)
        energy = (gradient_energies(policy, batch, context, live.nonzero().flatten()) + _EPS) * mask
        ahead = energy.flip(1).cumsum(1).flip(1)
        baseline = weighted_baseline(prefix_path(batch)[:, :-1], ahead, mask, rewards)
        return added((rewards[:, None] - self.share * baseline) * mask * live[:, None], batch)


def weighted_baseline(before: Tensor, weight: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """``[B, T]``: ``Σ_j W_j r_j / Σ_j W_j`` over the rows in each state, shrunk to the baseline of the state before."""
    baseline, number = torch.zeros(before.shape, dtype=torch.float64), int(before.max()) + 1
    present = rewards.clone()
    for t in range(before.shape[1]):
        rows = mask[:, t].nonzero().flatten()
        state, own, none = before[rows, t], weight[rows, t].double(), torch.zeros(number, dtype=torch.float64)
        total, size = none.index_add(0, state, own)[state], none.index_add(0, state, torch.ones_like(own))[state]
        praised = none.index_add(0, state, own * rewards[rows])[state]
        prior = total / size if t else torch.zeros_like(total)  # The group's own state has none before it.
        present = present.index_copy(0, rows, (praised + prior * present[rows]) / (total + prior).clamp(min=_EPS))
        baseline[:, t] = present
    return baseline


class PromptWeights(TokenCredit):
    """Uniform credit with prompts weighted as by `advantage.share: 0`: ``(1 - p^(G-1)) / (1 - 1/G)`` times Dr. GRPO's.

    Without its all-right groups, the expected step of right rollouts alone weighs prompts differently. This control has
    these weights and the mean as its baseline; ``p`` is the share of right rows of the group.
    """

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        same = (batch.group[:, None] == batch.group).double()
        size = same.sum(1)
        factor = (1 - ((same @ batch.rewards.double()) / size) ** (size - 1)) / (1 - 1 / size)
        values = factor[:, None] * batch.response_mask
        return TokenWeights(values=values.to(batch.advantages), fallback=torch.zeros_like(batch.finished))


class BySign(TokenCredit):
    """One advantage for right rollouts and one, negative, for wrong ones, in groups that have both.

    Wrong rollouts alone (0 and 1) are negative sample reinforcement (arXiv 2506.01347); right rollouts alone (1 and 0)
    are `advantage.share: 0`.
    """

    def __init__(self, right: float, wrong: float) -> None:
        self.right, self.wrong = right, wrong

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        live = in_live_groups(batch)
        advantages = torch.where(batch.correct, self.right, -self.wrong) * live
        return added(advantages[:, None] * batch.response_mask, batch)


class ResampledChoices(TokenCredit):
    r"""The value of the state after each token, less a share of the value of the state before it: nearly exact credit.

    It is no method to use: it samples many times as many tokens as the rollouts have.

    .. math:: A_{it} = V(s_t) - c\, V(s_{t-1})

    Values are means over continuations from the state before each token that was a choice; a token that was none leaves
    the value as it is, and the value of a whole response is its reward. Rows in one state have one value.

    Args:
        share: c.
        continuations: The number of continuations of each state.
    """

    services = (SampledContinuations,)

    def __init__(self, share: float = 0.25, continuations: int = 8) -> None:
        self.share, self.continuations = share, continuations

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        mask = batch.response_mask
        chosen, _ = choices(policy, batch)
        states = prefix_path(batch)[:, :-1]  # Before each token.
        places: dict[int, Prefix] = {}
        for row, column in chosen.nonzero().tolist():
            places.setdefault(int(states[row, column]), Prefix(row, column))
        outcomes, spent = context.service(SampledContinuations).draw(
            batch, [*places.values()], self.continuations, _BUDGET
        )
        found = {s: sum(o) / self.continuations for s, o in zip(places, outcomes, strict=True) if o is not None}
        assert len(found) == len(places)
        after = batch.rewards.float()
        additive = torch.zeros(mask.shape)
        for t in range(mask.shape[1] - 1, -1, -1):
            before = torch.tensor([found.get(s, float("nan")) for s in states[:, t].tolist()])
            before = torch.where(chosen[:, t] & ~before.isnan(), before, after)
            additive[:, t] = (after - self.share * before) * mask[:, t]
            after = torch.where(mask[:, t], before, after)
        metrics = {"continued_tokens": float(spent)}
        return TokenWeights(values=torch.zeros_like(additive), additive=additive, metrics=metrics)


def added(advantages: Tensor, batch: RolloutBatch) -> TokenWeights:
    """These token advantages in place of those of the group."""
    none = torch.zeros_like(batch.response_mask, dtype=batch.advantages.dtype)
    return TokenWeights(
        values=none, additive=advantages.to(batch.advantages), fallback=torch.zeros_like(batch.finished)
    )


# --- lines ------------------------------------------------------------------------------------------------------------


def more_subjects() -> list[Subject]:
    """The controls of GRAIL as it is; blame on the first flawed step alone, with and without a bound on weights."""
    return [
        Subject(name="Shuffled(GRAIL)", method=credit.GRAIL(), control=credit.Shuffled()),
        Subject(name="AnswerOnly(GRAIL)", method=credit.GRAIL(), control=credit.AnswerOnly()),
        Subject(name="Oracle, blame alone", method=credit.Oracle()),
        Subject(name="Oracle, blame alone, w_max=5", method=credit.Oracle(w_max=5)),
        Subject(name="Oracle, blame alone, w_max=1", method=credit.Oracle(w_max=1)),
        Subject(name="RandomSubset", method=credit.RandomSubset(0.2)),
    ]


def baselines() -> list[Subject]:
    """The lines of the table of baselines: how much of each reward is subtracted, and what the tree adds to it."""
    half_tree = partial(TreeAdvantage, scale=0.5)
    return [
        *(
            Subject(name=f"A = r - {c:g} mean", method=credit.Uniform(), advantage=GroupMean(share=c))
            for c in (0.75, 0.5, 0.25, 0.0)
        ),
        Subject(name="A = r - pooled energies", method=credit.Uniform(), advantage=EnergyBaseline()),
        Subject(
            name="A = r, all-right groups kept",
            method=credit.Uniform(),
            advantage=GroupMean(share=0.0, train_equal=True),
        ),
        Subject(name="wrong rollouts alone", method=BySign(0, 1)),
        Subject(name="prompts weighed as by A = r", method=PromptWeights()),
        Subject(name="OptimalBaseline", method=credit.OptimalBaseline()),
        Subject(name="OptimalBaseline, row left out", method=LeftOut("position")),
        Subject(name="OptimalBaseline, balanced", method=credit.OptimalBaseline(), control=credit.Balanced()),
        Subject(name="one baseline a row, row left out", method=LeftOut("row")),
        Subject(name="baseline of the tree, row left out", method=LeftOut("tree")),
        Subject(name="TreeAdvantage", method=TreeAdvantage()),
        Subject(name="TreeAdvantage, balanced", method=TreeAdvantage(), control=credit.Balanced()),
        *(
            Subject(name=f"A = r - {c:g} mean + tree/2", method=half_tree(), advantage=GroupMean(share=c))
            for c in (1.0, 0.5, 0.25, 0.0)
        ),
        Subject(name="A = r - pooled energies + tree/2", method=half_tree(), advantage=EnergyBaseline()),
        Subject(name="A = r + tree", method=TreeAdvantage(), advantage=GroupMean(share=0.0)),
        Subject(
            name="A = r + tree/2, permuted", method=credit.PermutedRewards(half_tree()), advantage=GroupMean(share=0.0)
        ),
        *(Subject(name=f"A = r - {c:g} b(s_t-1) by energies", method=TreeAndEnergies(c)) for c in (1.0, 0.75, 0.5)),
        Subject(name="GRAIL", method=credit.GRAIL()),
        Subject(name="GRAIL, balanced", method=credit.GRAIL(), control=credit.Balanced()),
    ]


def shares() -> list[Subject]:
    """Every method with several baselines: the lines of the table of shares."""
    methods = {subject.name: subject for subject in [*subjects(), *more_subjects()]}
    names = ("Uniform", "GRAIL", "OAR-G", "OAR-P", "HighEntropy", "RandomSubset", "AdvantageReweighting", "LESS")
    names += ("UCAS", "RLSD", "AttentionRhythm", "TreeAdvantage", "PrefixWeights", "Oracle, right=balanced")
    names += ("Oracle, blame alone, w_max=1",)
    lowered = ((name, c) for name in names for c in (1.0, 0.5, 0.25, 0.0))
    lines = [replace(methods[name], name=f"{name}, c = {c:g}", advantage=GroupMean(share=c)) for name, c in lowered]
    return [*lines, methods["OptimalBaseline"]]
