"""The truth about labelled rollouts: which lines or turns are wrong, the effect of each; and the table of agreement.

This module belongs to credit_quality.py and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens, ``S`` lines with a result, ``G`` prompts, ``N`` samples.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import TurnRewards
from grail_lightning.credit.oar import scoped_tokens
from grail_lightning.credit.turns import turn_scores, turn_table
from grail_lightning.functional.turns import spread_turns, sum_by_turn, turn_starts
from grail_lightning.grading import align_rows, step_masks
from grail_lightning.policy import Policy

ERRORS = ("slip", "misconception")
KINDS = ("sound", *ERRORS, "inherited")
BAD_TURN = "bad turn"


@dataclass(frozen=True)
class Lines:
    """The lines of each row that have a result, in front of its answer."""

    begin: Tensor  # [B, S] long, the first token in which an error is, or would be, visible.
    stop: Tensor  # [B, S] long, the index after the last such token.
    after: Tensor  # [B, S] long, the index of the first token that follows the line.
    kind: dict[str, Tensor]  # [B, S] bool a kind; a line that is no equation keeps its place and has no kind.
    mean: bool = False  # Whether a line has the mean of its tokens' scores; else the largest.

    def of(self, scores: Tensor) -> Tensor:
        """``[B, T] -> [B, S]``: the score of each line; −inf, or NaN as a mean, where there is none."""
        columns = torch.arange(scores.shape[1])
        inside = (columns >= self.begin[..., None]) & (columns < self.stop[..., None])
        if self.mean:
            return (scores[:, None].double() * inside).sum(-1) / inside.sum(-1)
        return scores[:, None].masked_fill(~inside, -torch.inf).amax(-1)

    @property
    def known(self) -> Tensor:
        """``[B, S]`` bool: lines with a result."""
        return self.begin < self.stop


def label_lines(batch: RolloutBatch, policy: Policy) -> Lines:
    """The lines of a batch with located answers."""
    columns = torch.arange(1, batch.answer.whole.shape[1] + 1)
    ends = torch.where(batch.answer.whole, columns - 1, batch.response_mask.shape[1]).amin(1)
    found: list[list[tuple[int, int, str]]] = []
    for aligned, prompt, end in zip(align_rows(batch, policy.tokenizer), batch.prompts, ends.tolist(), strict=True):
        row = []
        for step in prompt.task.label_steps(aligned.text, prompt) or []:
            tokens = aligned.overlapping(*(step.result or (step.start, step.stop)))
            if step.kind == "filler" or not tokens or tokens[-1] >= end:
                continue
            row.append((tokens[0], tokens[-1] + 1, step.kind) if step.result else (0, 0, ""))
        found.append(row)
    shape = len(found), max(max(map(len, found)), 1)
    begin, stop = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    kind = {name: torch.zeros(shape, dtype=torch.bool) for name in KINDS}
    for b, row in enumerate(found):
        for s, (start, end, name) in enumerate(row):
            begin[b, s], stop[b, s] = start, end
            if name:
                kind[name][b, s] = True
    # The token behind a result belongs to it, since "1" may still become "12".
    return Lines(begin, stop, stop + 1, kind)


def label_turns(batch: RolloutBatch) -> Lines:
    """The turns of a batch. A call is sound if the environment scores it above 0; an answer has no kind."""
    turns = turn_table(batch)
    number = turns.exists.shape[1]
    begin, scores = turn_starts(turns.numbers, number), turn_scores(TurnRewards(), batch, turns.exists)
    stop = begin + sum_by_turn(batch.response_mask.long(), turns.numbers, number)
    return Lines(begin, stop, stop, {BAD_TURN: scores <= 0, "sound": scores > 0}, mean=True)


@dataclass(frozen=True, kw_only=True)
class World:
    """Rollouts with their labels and the measured effects."""

    batch: RolloutBatch
    group_size: int  # The number of rows of a prompt.
    lines: Lines
    kinds: dict[str, Tensor]  # [B, T]: result tokens by kind in front of the answer, filler, and the answer's content.
    reasoning: Tensor  # [B, T] bool, tokens in front of the answer.
    forks: dict[str, Forks]  # Of wrong rollouts, by each kind of error that this world has.
    wrong: Tensor  # [B] bool, boxed rows with a negative advantage.
    right: Tensor  # [B] bool, boxed rows with a positive advantage.
    effect: Tensor  # [B, T], truth (a).
    gains: Tensor  # [2, B, S], truth (b): what each line adds to the success rate, in two independent halves.

    @property
    def earned(self) -> Tensor:
        """``[2, B, S]``: the gain in the direction of the outcome; in wrong rollouts, the loss."""
        return self.gains * self.batch.advantages.sign()[:, None]


def pairwise_auroc(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    r"""Probability that a positive token has a higher score than a negative one of its row; ties count one half.

    .. math:: \frac{1}{|P||N|} \sum_{i \in P, j \in N} [s_i > s_j] + \tfrac12 [s_i = s_j]

    All three are ``[B, T]``, the masks bool; the result is ``[B]`` float64, NaN where a row lacks one of the two.
    """
    rows = torch.full((len(scores),), torch.nan, dtype=torch.float64, device=scores.device)
    for row in (positive.any(1) & negative.any(1)).nonzero().flatten().tolist():
        gap = scores[row][positive[row]][:, None] - scores[row][negative[row]]
        rows[row] = (gap > 0).double().mean() + (gap == 0).double().mean() / 2
    return rows


def regions(batch: RolloutBatch, policy: Policy) -> tuple[dict[str, Tensor], Tensor]:
    """`World.kinds` and `World.reasoning` of a batch with located answers."""
    reasoning = scoped_tokens(batch, "reasoning")
    if batch.turn is not None:
        turns, labels = turn_table(batch), label_turns(batch).kind
        masks = {name: spread_turns(kind.long(), turns.numbers).bool() for name, kind in labels.items()}
        return masks | {"answer": batch.response_mask & ~masks[BAD_TURN] & ~masks["sound"]}, reasoning
    masks = step_masks(batch, policy.tokenizer)
    assert masks is not None
    flawed = masks["slip"] | masks["misconception"]
    kinds = {"flawed": flawed, "sound": masks["sound"], "inherited": masks["inherited"], "filler": masks["filler"]}
    return {name: mask & reasoning for name, mask in kinds.items()} | {
        "answer": batch.answer.content & ~batch.answer.marker
    }, reasoning


# --- agreement --------------------------------------------------------------------------------------------------------


def rank_correlation(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """``[B]``: Spearman's ρ of two ``[B, S]`` within each row's mask; NaN where one of them does not vary."""
    ranks = [rankdata(np.where(mask, values.double(), np.nan), axis=1, nan_policy="omit") for values in (one, other)]
    a, b = (torch.from_numpy(r) - torch.from_numpy(r).nanmean(1, keepdim=True) for r in ranks)
    return (a * b).nansum(1) / (a.square().nansum(1) * b.square().nansum(1)).sqrt()


@dataclass(frozen=True, kw_only=True)
class Forks:
    """``M`` pairs of rollouts that are equal up to a token, from which one continues wrongly and the other soundly."""

    row: Tensor  # [2, M] long, the flawed rollouts and the sound ones.
    line: Tensor  # [M] long, the line of the token in both.
    token: Tensor  # [M] long, the first token in which they differ.
    group_size: int
    num_groups: int  # G

    def wins(self, flawed: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
        """Of two values ``[M]``, pairs with the flawed one above (ties count half) and pairs, ``[G]`` each."""
        known = ~(flawed.isnan() | sound.isnan())
        won = ((flawed > sound).double() + (flawed == sound).double() / 2) * known
        group, none = self.row[0] // self.group_size, torch.zeros(self.num_groups, dtype=torch.float64)
        return none.index_add(0, group, won), none.index_add(0, group, known.double())


def forks(batch: RolloutBatch, lines: Lines, rows: Tensor, error: str, group_size: int) -> Forks:
    """The forks at which a result with this error and a sound one follow the same tokens of the same prompt."""
    ids, places = batch.response_ids.tolist(), torch.nonzero(rows[:, None] & lines.known).tolist()
    after: dict[tuple[object, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for b, s in places:
        for kind in (error, "sound"):
            if lines.kind[kind][b, s]:
                after[b // group_size, s, *ids[b][: lines.begin[b, s]]][kind].append(b)
    found = []
    for (_, s, *_), by_kind in after.items():
        for i in by_kind[error]:
            for j in by_kind["sound"]:
                parting = next(t for t, (x, y) in enumerate(zip(ids[i], ids[j], strict=True)) if x != y)
                found.append((i, j, s, parting))
    flawed, sound, line, token = torch.tensor(found, dtype=torch.long).reshape(-1, 4).unbind(1)
    return Forks(
        row=torch.stack([flawed, sound]),
        line=line,
        token=token,
        group_size=group_size,
        num_groups=len(batch) // group_size,
    )


class Estimate(NamedTuple):
    """A mean with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.value != self.value:
            return "-"
        return f"{self.value:.2f} ±{(self.high - self.low) / 2:.2f}"


def resamplings(num_prompts: int, draws: int, seed: int) -> Tensor:
    """``[draws, G]`` float64: how often each draw of as many prompts with replacement has each prompt."""
    uniform = torch.ones(num_prompts, dtype=torch.float64) / num_prompts
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.multinomial(num_prompts, uniform.numpy(), size=draws)).double()


def over_prompts(totals: Tensor, counts: Tensor, draws: Tensor) -> Estimate:
    """The mean ``Σ totals / Σ counts`` and the percentile interval of its bootstrap over prompts.

    `totals` and `counts` are ``[G]``, the sum and the number of the values of each prompt.
    """
    means = (draws @ totals.double()) / (draws @ counts.double())
    low, high = means.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(totals.sum() / counts.sum()), low, high)


# --- the table ---

Sums = tuple[Tensor, Tensor]
"""What the rows of each prompt add up to, and of how many: ``[G]`` each."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The ranks and weights that a subject gives to all rollouts."""

    ranks: Tensor  # [B, T], by which the tokens of a rollout are ranked.
    weights: Tensor | None  # [B, T], the factor of the advantage, an additive stage included; None for a bare score.
    seconds: float  # Of the processor for 1,000 rollouts, the median over batches.


def column_names(world: World) -> tuple[str, ...]:
    """The columns of a world."""
    truths = "b" if world.lines.mean else "ab"
    return (
        *(f"{place}: {error}" for place in ("in rollout", "at fork") for error in world.forks),
        *(f"weight: {kind}" for kind in world.kinds),
        *(f"rho ({truth}): {outcome}" for truth in truths for outcome in ("wrong", "right")),
    )


def by_prompt(rows: Tensor, world: World) -> Sums:
    """Sums over the rows ``[B]`` of each prompt that have a value."""
    groups = rows.double().reshape(-1, world.group_size)
    return groups.nansum(1), (~groups.isnan()).double().sum(1)


def where(rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, rows, torch.nan)


def detection(lines: Tensor, world: World) -> dict[str, Sums]:
    """Flawed against sound lines of the same rollout."""
    kind, measured = world.lines.kind, world.wrong[:, None] & ~lines.isnan()
    return {
        f"in rollout: {error}": by_prompt(
            pairwise_auroc(lines, kind[error] & measured, kind["sound"] & measured), world
        )
        for error in world.forks
    }


def agreement(ranks: Tensor, lines: Tensor, world: World) -> dict[str, Sums]:
    """Rank correlation with both truths, in wrong and in right rollouts."""
    earned = world.earned.mean(0)
    with_effect = rank_correlation(ranks, world.effect, world.reasoning)
    with_gain = rank_correlation(lines, earned, world.lines.known & ~earned.isnan())
    return {
        "rho (a): wrong": by_prompt(where(with_effect, world.wrong), world),
        "rho (a): right": by_prompt(where(with_effect, world.right), world),
        "rho (b): wrong": by_prompt(where(with_gain, world.wrong), world),
        "rho (b): right": by_prompt(where(with_gain, world.right), world),
    }


def placement(weights: Tensor, world: World) -> dict[str, Sums]:
    """Mean weight of the tokens of each kind in wrong rollouts."""
    columns = {}
    for name, mask in world.kinds.items():
        chosen = (mask & world.wrong[:, None]).double()
        totals, counts = (x.sum(1).reshape(-1, world.group_size).sum(1) for x in (weights * chosen, chosen))
        columns[f"weight: {name}"] = (totals, counts)
    return columns


def credit_columns(credit: Credit, world: World) -> dict[str, Sums]:
    lines = world.lines.of(credit.ranks)
    columns = detection(lines, world) | agreement(credit.ranks, lines, world)
    # Weights can be compared between rollouts; raw scores differ in scale.
    comparable = credit.ranks if credit.weights is None else credit.weights
    values = world.lines.of(comparable) if world.lines.mean else comparable
    for error, pairs in world.forks.items():
        place = pairs.line if world.lines.mean else pairs.token
        columns[f"at fork: {error}"] = pairs.wins(*values[pairs.row, place])
    return columns if credit.weights is None else columns | placement(credit.weights, world)


def gain_columns(world: World) -> dict[str, Sums]:
    """The resampled truth itself; its agreement is that of its two halves."""
    one, other = world.earned
    mean = (one + other) / 2
    halves = rank_correlation(one, other, world.lines.known & ~mean.isnan())
    at_forks = {f"at fork: {error}": f.wins(*mean[f.row, f.line]) for error, f in world.forks.items()}
    return (
        detection(mean, world)
        | at_forks
        | {
            "rho (b): wrong": by_prompt(where(halves, world.wrong), world),
            "rho (b): right": by_prompt(where(halves, world.right), world),
        }
    )


@dataclass(frozen=True)
class Table:
    """Prints a table line by line."""

    draws: Tensor  # Of the bootstrap over prompts, from `resamplings`.
    compact: bool  # Whether only detection is shown, with the tokens that a method sampled.
    names: tuple[str, ...]  # All columns of the world.

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(c for c in self.names if not self.compact or c.startswith(("in rollout", "at fork")))

    def head(self) -> None:
        extra = ["tokens"] if self.compact else []
        print("| " + " | ".join(["method", "by", *self.columns, *extra, "s / 1,000"]) + " |")
        print("|---|---|" + "--:|" * (len(self.columns) + len(extra) + 1))

    def row(self, name: str, by: str, columns: dict[str, Sums], seconds: float, tokens: float = 0.0) -> None:
        """Print a line; `tokens` is the number of sampled tokens over that of the rollouts."""
        none = Estimate(float("nan"), float("nan"), float("nan"))
        cells = [str(over_prompts(*columns[c], self.draws) if c in columns else none) for c in self.columns]
        extra = [f"{tokens:.1f}" if tokens else "0"] if self.compact else []
        print("| " + " | ".join([name, by, *cells, *extra, f"{seconds:.2f}"]) + " |", flush=True)
