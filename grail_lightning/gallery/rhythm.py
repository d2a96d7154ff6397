"""Credit by the rhythm of attention: tokens that open a phrase, and tokens to which later ones look back (2510.13554).

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens, ``N`` positions, ``H`` heads,
``J`` heads of all measured blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grail_lightning.core.credit.base import CreditContext, Mean, TokenCredit, TokenWeights, one_elsewhere
from grail_lightning.core.credit.grail import in_gate
from grail_lightning.core.credit.measure import measure_rows
from grail_lightning.core.functional.credit_measures import future_influence, lookback, top_share
from grail_lightning.core.policy.layout import TokenLayout
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options

_Rhythm = Literal["pre_plan", "anchor", "coupled"]
_Gate = Literal["positive", "all"]


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How attention maps are read. The paper's text leaves most of these open; the values are ours where it does.

    Attributes:
        blocks: The number of blocks whose maps are averaged, spread evenly over the middle third of the stack.
        head_share: The share of these blocks' heads, in each rollout, that counts as local (smallest mean distance),
            and the share that counts as global (largest).
        window: The distance from which keys count as equally far for the lookback of local heads.
        nearest: The smallest distance at which a later token's attention counts as influence.
        farthest: The largest such distance.
    """

    blocks: int = 5
    head_share: float = 0.3
    window: int = 10
    nearest: int = 10
    farthest: int = 50

    def __post_init__(self) -> None:
        check_options(self, blocks="[1, inf)", head_share="(0, 0.5]", window="[1, inf)", farthest="[1, inf)")
        check_options(self, nearest=f"[1, {self.farthest}]")


@dataclass(eq=False)
class AttentionRhythm(TokenCredit):
    r"""More credit for the tokens that attention marks as the beginning of a phrase, or as an anchor of later ones.

    Local heads give the lookback ``d_t``, the mean distance of the keys that token ``t`` attends to, with distances
    capped at `window`; global heads give the influence ``f_s``, the mean attention that token ``s`` receives from the
    tokens 10 to 50 places later:

    .. math:: \Delta_t = |d_t - d_{t+1}|, \qquad
              w_t = 1 + \gamma\, [t \in \mathrm{top}_\rho(\Delta)] \text{ (pre_plan)}, \qquad
              w_s = 1 + \gamma\, [s \in \mathrm{top}_\rho(f)] \text{ (anchor)}

    *Coupled*: the bonus of an anchor whose lookback is below the rollout's median passes a share `passed_on` of it to
    the token of largest ``Δ`` among the `reach` tokens before it, which introduced it.

    A token whose score is 0 has no bonus. Rollouts outside the gate keep weight 1 and need no forward pass. The maps of
    one block exist at a time, ``b · H · N²`` numbers: lower `execution.token_budget` if they are too large. No
    difference is taken, and no bonus passed on, over what an environment answers.

    Args:
        rhythm: pre_plan, anchor or coupled.
        bonus: γ.
        share: ρ, the share of a rollout's tokens that gets the bonus.
        passed_on: The share of the bonus that a coupled anchor passes on.
        reach: The number of tokens before a coupled anchor that may receive it.
        gate: Which rollouts are reweighted, by the sign of their advantage: positive, as published, or all.
        attention: How attention maps are read.

    Source: arXiv 2510.13554; heads, thresholds and the share passed on follow a third party's description.
    """

    rhythm: _Rhythm = "coupled"
    bonus: float = 0.5
    share: float = 0.4
    passed_on: float = 0.5
    reach: int = 3
    gate: _Gate = "positive"
    attention: AttentionOptions = AttentionOptions()

    def __post_init__(self) -> None:
        check_options(self, rhythm=_Rhythm, bonus="[0, inf)", share="[0, 1]", passed_on="[0, 1]", reach="[1, inf)")
        check_options(self, gate=_Gate)

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from attention maps."""
        mask, weighed = batch.response_mask, in_gate(self.gate, batch.advantages) & (batch.advantages != 0)
        rows, read = weighed.nonzero().flatten(), partial(_read, policy, options=self.attention)
        with policy.eager_attention():
            looks_back, influence = measure_rows(policy, batch, context, rows, read, 2, padded=True)
        change = _change(looks_back, mask)
        scores = change if self.rhythm == "pre_plan" else influence
        scored = mask & weighed[:, None]
        marked = top_share(scores, mask, self.share) & (scores > 0) & scored  # Ties at 0 would go to the beginning.
        extra = self.bonus * marked.to(scores.dtype)
        if self.rhythm == "coupled":
            extra = self._couple(extra, marked, looks_back, change, mask)
        return TokenWeights(
            values=one_elsewhere(1 + extra, scored, mask),
            scores=scores.masked_fill(~scored, 0),
            metrics={"attention_lookback": Mean.over(looks_back, scored & _followed(mask))},
        )

    def _couple(self, extra: Tensor, anchors: Tensor, looks_back: Tensor, change: Tensor, mask: Tensor) -> Tensor:
        """``[B, T]``: the bonus after local anchors have passed a part of it on."""
        # By sorting: CUDA has no deterministic `median`.
        looking = _followed(mask)
        middle = (looking.sum(1, keepdim=True) - 1).clamp(min=0) // 2
        median = looks_back.masked_fill(~looking, torch.inf).sort(1).values.gather(1, middle)
        local = anchors & (looks_back < median)
        moved = extra.clone()
        # The column in which the turn of each token begins.
        begun = torch.where(mask, 0, torch.arange(1, mask.shape[1] + 1, device=mask.device)).cummax(1).values.tolist()
        for row, place in local.nonzero().tolist():
            first = max(begun[row][place], place - self.reach)
            if first == place:
                continue
            giver = first + int(change[row, first:place].argmax())
            part = self.passed_on * float(extra[row, place])
            moved[row, place] -= part
            moved[row, giver] += part
        return moved


def _followed(mask: Tensor) -> Tensor:
    """``[B, T]`` bool: the tokens that have a lookback, all but the last one of a turn, which is no query."""
    return mask & F.pad(mask[:, 1:], (0, min(1, mask.shape[1])))


def _change(looks_back: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]``: the size of the difference to the next token; 0 for the last two of a turn, one of which has none."""
    change = torch.zeros_like(looks_back)
    change[:, :-1] = (looks_back[:, :-1] - looks_back[:, 1:]).abs()
    followed = mask[:, :-2] & mask[:, 1:-1] & mask[:, 2:]
    return change.masked_fill(~F.pad(followed, (0, mask.shape[1] - followed.shape[1])), 0)


def _read(policy: Policy, layout: TokenLayout, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Lookback and influence ``[b, t]`` of the response tokens in a padded layout."""
    # The last token of a turn is not a query. That of a row is run only where another row is longer.
    queries = _marked(layout, layout.predictors) & _marked(layout, layout.places[layout.places >= 0])
    with _figures(policy, queries, options) as figures:
        policy.decode(layout, compiled=False)
    if not figures:
        raise ValueError(
            f"`AttentionRhythm` needs attention maps, but {type(policy.model).__name__} reports none with eager "
            "attention. Use another credit method for this model."
        )
    near, distance, influence = (torch.cat(parts, 1) for parts in zip(*figures, strict=True))
    counted = queries[:, None].to(distance.dtype)
    span = (distance * counted).sum(-1) / counted.sum(-1).clamp(min=1)
    number = max(1, int(options.head_share * span.shape[1]))
    order = span.sort(dim=1, stable=True).indices
    return (
        layout.read(_of_heads(near, order[:, :number]) * queries, "token"),
        layout.read(_of_heads(influence, order[:, -number:]), "token"),
    )


def _marked(layout: TokenLayout, places: Tensor) -> Tensor:
    empty = torch.zeros(layout.ids.numel(), dtype=torch.bool, device=layout.ids.device)
    return empty.index_fill(0, places, True).view_as(layout.ids)


def _of_heads(figures: Tensor, heads: Tensor) -> Tensor:
    """``[b, J, N] -> [b, N]``: the mean over the heads ``[b, j]`` of each row."""
    return figures.gather(1, heads[:, :, None].expand(-1, -1, figures.shape[2])).mean(1)


@contextmanager
def _figures(
    policy: Policy, queries: Tensor, options: AttentionOptions
) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """A list that a forward pass inside the context fills, block by block.

    Each entry holds the capped lookback, the lookback and the influence of each head, ``[b, H, N]``.
    """
    figures: list[tuple[Tensor, Tensor, Tensor]] = []

    def reduce(module: nn.Module, args: object, output: object) -> None:
        for item in output if isinstance(output, tuple) else ():
            if isinstance(item, Tensor) and item.dim() == 4:
                maps = item.float()
                influence = future_influence(maps, queries, options.nearest, options.farthest)
                figures.append((lookback(maps, options.window), lookback(maps), influence))

    with ExitStack() as stack:
        for number in middle_blocks(len(policy.blocks), options.blocks):
            for name, module in policy.blocks[number].named_children():
                if "attn" in name or "attention" in name:
                    stack.callback(module.register_forward_hook(reduce).remove)
        yield figures


def middle_blocks(depth: int, number: int) -> list[int]:
    """Indices of at most `number` different blocks, spread evenly from a third to two thirds of the stack."""
    places = torch.linspace(depth / 3, 2 * depth / 3, number).round().int().tolist()
    return sorted({min(place, depth - 1) for place in places})
