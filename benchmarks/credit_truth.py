"""The truth about labelled rollouts: which lines are wrong, and what each changes; and the table of agreement with it.

This module belongs to credit_quality.py and is not run by itself. A line is an equation of a chain, a statement of a
program, or a turn.

Shapes: ``B`` rows, ``T`` response tokens, ``S`` lines, ``G`` prompts, ``N`` samples.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from credit_values import Lab, turns_before
from scipy.stats import rankdata
from torch import Tensor

from grail_lightning import GradedBatch, Policy, RolloutBatch
from grail_lightning.core.credit.oar import scoped_tokens
from grail_lightning.core.credit.turns import turn_scores, turn_table
from grail_lightning.core.functional.advantages import spread_turns, sum_by_turn, turn_starts
from grail_lightning.core.rollout.grading import align_rows, step_masks
from grail_lightning.core.runtime.seeds import derive_seed

ERRORS = ("slip", "misconception")
KINDS = ("sound", *ERRORS, "inherited")
BAD_TURN = "bad turn"


# --- labels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """The labelled lines of each row, in front of its answer."""

    begin: Tensor  # [B, S] long, the first token in which an error is, or would be, visible.
    stop: Tensor  # [B, S] long, the index after the last such token.
    after: Tensor  # [B, S] long, the index of the first token that follows the line.
    kind: dict[str, Tensor]  # [B, S] bool a kind; a line that is no equation keeps its place and has no kind.
    mean: bool = False  # Whether a line has the mean of its tokens' scores; else the largest.

    def of(self, scores: Tensor) -> Tensor:
        """``[B, T] -> [B, S]``: the score of each line; −inf, or NaN as a mean, where there is none."""
        inside = self.tokens(scores.shape[1])
        if self.mean:
            return (scores[:, None].double() * inside).sum(-1) / inside.sum(-1)
        return scores[:, None].masked_fill(~inside, -torch.inf).amax(-1)

    def tokens(self, width: int) -> Tensor:
        """``[B, S, T]`` bool: the tokens of each line."""
        columns = torch.arange(width)
        return (columns >= self.begin[..., None]) & (columns < self.stop[..., None])

    @property
    def known(self) -> Tensor:
        """``[B, S]`` bool: lines that are there."""
        return self.begin < self.stop


def label_lines(batch: RolloutBatch, policy: Policy, *, whole: bool = False) -> Lines:
    """The lines of a batch with located answers: their results, or if they are `whole` all of their tokens."""
    width = batch.response_mask.shape[1]
    ends = torch.full((len(batch),), width)
    if not whole:
        ends = torch.where(batch.answer.whole, torch.arange(width), width).amin(1)
    rows: list[list[tuple[int, int, str]]] = []
    for aligned, prompt, end in zip(align_rows(batch, policy.tokenizer), batch.prompts, ends.tolist(), strict=True):
        rows.append([])
        for step in prompt.task.label_steps(aligned.text, prompt) or []:
            tokens = aligned.overlapping(*((not whole and step.result) or (step.start, step.stop)))
            if step.kind != "filler" and tokens and tokens[-1] < end:
                labelled = whole or step.result
                rows[-1].append((tokens[0], tokens[-1] + 1, step.kind) if labelled else (0, 0, ""))
    shape = len(rows), max(1, *map(len, rows))
    begin, stop = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    kind = {name: torch.zeros(shape, dtype=torch.bool) for name in KINDS}
    for b, row in enumerate(rows):
        for s, (first, last, name) in enumerate(row):
            begin[b, s], stop[b, s] = first, last
            if name:
                kind[name][b, s] = True
    # The token behind a result belongs to it, since "1" may still become "12".
    return Lines(begin, stop, stop if whole else stop + 1, kind)


def label_turns(batch: RolloutBatch) -> Lines:
    """The turns of a batch. A call is sound if the environment scores it above 0; an answer has no kind."""
    turns = turn_table(batch)
    number = turns.exists.shape[1]
    begin, scores = turn_starts(turns.numbers, number), turn_scores(batch, turns.exists)
    stop = begin + sum_by_turn(batch.response_mask.long(), turns.numbers, number)
    return Lines(begin, stop, stop, {BAD_TURN: scores <= 0, "sound": scores > 0}, mean=True)


def regions(batch: RolloutBatch, policy: Policy) -> dict[str, Tensor]:
    """`World.kinds` of a batch with located answers."""
    if batch.turn is not None:
        turns, labels = turn_table(batch), label_turns(batch).kind
        masks = {name: spread_turns(kind.long(), turns.numbers).bool() for name, kind in labels.items()}
        return masks | {"answer": batch.response_mask & ~masks[BAD_TURN] & ~masks["sound"]}
    masks, reasoning = step_masks(batch, policy.tokenizer), scoped_tokens(batch, "reasoning")
    assert masks is not None
    masks["flawed"] = masks["slip"] | masks["misconception"]
    kinds = {name: masks[name] & reasoning for name in ("flawed", "sound", "inherited", "filler")}
    return kinds | {"answer": batch.answer.content & ~batch.answer.marker}


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
    pairs = []
    for (_, s, *_), by_kind in after.items():
        for i in by_kind[error]:
            for j in by_kind["sound"]:
                parting = next(t for t, (x, y) in enumerate(zip(ids[i], ids[j], strict=True)) if x != y)
                pairs.append((i, j, s, parting))
    flawed, sound, line, token = torch.tensor(pairs, dtype=torch.long).reshape(-1, 4).unbind(1)
    row, num_groups = torch.stack([flawed, sound]), len(batch) // group_size
    return Forks(row=row, line=line, token=token, group_size=group_size, num_groups=num_groups)


@dataclass(frozen=True, kw_only=True)
class World:
    """Rollouts with their labels and the measured effects."""

    batch: RolloutBatch
    group_size: int  # The number of rows of a prompt.
    lines: Lines
    kinds: dict[str, Tensor]  # [B, T]: tokens by the kind of their line in front of the answer, filler, and the answer.
    forks: dict[str, Forks]  # Of wrong rollouts, by each kind of error that this world has.
    wrong: Tensor  # [B] bool, rows with a negative advantage, and where answers are boxed with a box.
    right: Tensor  # [B] bool, the same with a positive advantage.
    effect: Tensor | None  # [B, T], truth (a).
    gains: Tensor  # [2, B, S], truth (b): what each line adds to the success rate, in two independent halves.
    flawed: Tensor | None = None  # [B, T] bool, whose share of the blame is a column, where lines are statements.

    @property
    def earned(self) -> Tensor:
        """``[2, B, S]``: the gain in the direction of the outcome; in wrong rollouts, the loss."""
        return self.gains * self.batch.advantages.sign()[:, None]

    def columns(self, *, compact: bool) -> tuple[str, ...]:
        """The columns of its table; a compact one has those of detection alone."""
        detected = [f"{place}: {error}" for place in ("in rollout", "at fork") for error in self.forks]
        if compact:
            return tuple(detected)
        truths = "ab" if self.effect is not None else "b"
        blame = ["flawed"] if self.flawed is not None else []
        rhos = [f"rho ({truth}): {outcome}" for truth in truths for outcome in ("wrong", "right")]
        return (*blame, *detected, *(f"weight: {kind}" for kind in self.kinds), *rhos)


def world_of(batch: RolloutBatch, lab: Lab, lines: Lines, boxed: Tensor, errors: tuple[str, ...], **truths) -> World:
    """A world in which rows ``[B]`` with a box count; `truths` are its other fields."""
    size, wrong = lab.setting.group_size, boxed & (batch.advantages < 0)
    truths |= {"wrong": wrong, "right": boxed & (batch.advantages > 0)}
    pairs = {error: forks(batch, lines, wrong, error, size) for error in errors}
    return World(batch=batch, group_size=size, lines=lines, forks=pairs, **truths)


# --- what lines change ------------------------------------------------------------------------------------------------


def gains_of_lines(lab: Lab, batch: RolloutBatch, lines: Lines, rows: Tensor, samples: int, seed: int) -> Tensor:
    """``[2, B, S]``: by how much each line changes the success rate of continuations, NaN where it was not measured.

    Compared are the position before the result's first token and `Lines.after`, by the first half of the samples and by
    the second.
    """
    gains, size = torch.full((2, *lines.begin.shape), torch.nan), lab.setting.group_size
    groups = (rows // size).unique()
    for some in groups.split(16) if len(groups) else ():
        places = []
        for b in rows[torch.isin(rows // size, some)].tolist():
            for s in lines.known[b].nonzero().flatten().tolist():
                ends = (beginning(batch, b, int(x[b, s])) for x in (lines.begin, lines.after))
                places.append((b, s, *((b - b % size, ids) for ids in ends)))
        right = outcomes(lab, batch, {start for place in places for start in place[2:]}, samples, seed)
        for b, s, before, after in places:
            gain = right[after] - right[before]
            gains[:, b, s] = gain[: samples // 2 * 2].reshape(2, -1).mean(1)
    return gains


def beginning(batch: RolloutBatch, row: int, stop: int) -> tuple:
    """What stands in front of a column of a row: ids, or the turns in a rollout of several turns."""
    return tuple(batch.response_ids[row, :stop].tolist()) if batch.turn is None else turns_before(batch, row, stop)


def outcomes(lab: Lab, batch: RolloutBatch, starts: set[tuple], samples: int, seed: int) -> dict[tuple, Tensor]:
    """``[N]`` float for each start, a row of the prompt and a `beginning`: whether continuations end right."""
    ordered = sorted(starts)
    if batch.turn is not None:
        places = [(batch.prompts[row], turns) for row, turns in ordered]
        drawn = lab.continue_turns(places, samples, derive_seed(seed, ordered[0][0]))
        return dict(zip(ordered, torch.cat([right for _, right in drawn]), strict=True))
    by_length: dict[int, list[tuple]] = defaultdict(list)
    for row, ids in ordered:
        by_length[len(ids)].append((row, ids))
    right: dict[tuple, Tensor] = {}
    for length, some in by_length.items():
        key = derive_seed(seed, some[0][0], length)
        drawn = lab.continue_tokens([(batch.prompts[row], ids) for row, ids in some], samples, key)
        right |= zip(some, drawn[1], strict=True)
    return right


def q_and_v(
    values: dict[str, np.ndarray], half: int, number: int, batch: GradedBatch, baseline: str = "value"
) -> tuple[Tensor, Tensor]:
    """``[B, T]`` each: Q and V of each token of a batch (or another baseline) by a half of the values of a file."""
    width = batch.response_mask.shape[1]
    value, before = (torch.from_numpy(values[name][number, :, :width, half]).float() for name in ("value", baseline))
    # A token that is no choice leaves the value as it is: it takes that of the next choice, and Q is the next V.
    after = torch.empty_like(value)
    q = batch.rewards.clone().float()
    for t in range(width - 1, -1, -1):
        after[:, t] = q
        q = torch.where(value[:, t].isnan(), q, value[:, t])
    before = torch.where(before.isnan(), after, before)
    if batch.turn is None:
        return after, before
    turns = turn_table(batch)
    places = turn_starts(turns.numbers, turns.exists.shape[1]).clamp(max=width - 1)
    first, then = (spread_turns(x.gather(1, places), turns.numbers) for x in (after, before))
    return first, then


def gains_of_file(values: dict[str, np.ndarray], batch: GradedBatch, lines: Lines) -> Tensor:
    """``[2, B, S]``: by how much each line changes the value, the sum of `Q - V` over its tokens, by half."""
    gains = []
    for half in (0, 1):
        q, v = q_and_v(values, half, 0, batch)
        change = torch.nn.functional.pad(((q - v) * batch.response_mask).cumsum(1), (1, 0))
        gains.append(change.gather(1, lines.stop) - change.gather(1, lines.begin))
    return torch.stack(gains).masked_fill(~lines.known, torch.nan)


# --- agreement --------------------------------------------------------------------------------------------------------


def pairwise_auroc(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    r"""Probability that a positive token has a higher score than a negative one of its row; ties count one half.

    .. math:: \frac{1}{|P||N|} \sum_{i \in P, j \in N} [s_i > s_j] + \tfrac12 [s_i = s_j]

    All three are ``[B, T]``, the masks bool; the result is ``[B]`` float64, NaN where a row lacks one of the two.
    """
    chosen = np.where(positive | negative, scores.double(), np.nan)
    ranks = torch.from_numpy(rankdata(chosen, axis=1, nan_policy="omit")).masked_fill(~positive, 0)
    number, others = positive.sum(1).double(), negative.sum(1)
    return (ranks.sum(1) - number * (number + 1) / 2) / (number * others)


def rank_correlation(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """``[B]``: Spearman's ρ of two ``[B, S]`` within each row's mask; NaN where one of them does not vary."""
    ranks = [rankdata(np.where(mask, values.double(), np.nan), axis=1, nan_policy="omit") for values in (one, other)]
    a, b = (torch.from_numpy(r) - torch.from_numpy(r).nanmean(1, keepdim=True) for r in ranks)
    return (a * b).nansum(1) / (a.square().nansum(1) * b.square().nansum(1)).sqrt()


def resamplings(num_prompts: int, draws: int, seed: int) -> Tensor:
    """``[draws, G]`` float64: how often each draw of as many prompts with replacement has each prompt."""
    uniform = np.full(num_prompts, 1 / num_prompts)
    return torch.from_numpy(np.random.default_rng(seed).multinomial(num_prompts, uniform, size=draws)).double()


Sums = tuple[Tensor, Tensor]
"""What the rows of each prompt add up to, and of how many: ``[G]`` each."""


def over_prompts(sums: Sums, draws: Tensor) -> str:
    """The mean ``Σ totals / Σ counts``, with half of the percentile interval of its bootstrap over prompts."""
    totals, counts = (x.double() for x in sums)
    means = (draws @ totals) / (draws @ counts)
    low, high = means.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    value = float(totals.sum() / counts.sum())
    return f"{value:.2f} ±{(high - low) / 2:.2f}" if value == value else "-"


def by_prompt(rows: Tensor, world: World) -> Sums:
    """Sums over the rows ``[B]`` of each prompt that have a value."""
    groups = rows.double().reshape(-1, world.group_size)
    return groups.nansum(1), (~groups.isnan()).double().sum(1)


def share(weights: Tensor, chosen: Tensor, of: Tensor, world: World) -> Sums:
    """Sums over the rows of each prompt of the weights ``[B, T]`` of chosen tokens, and of `of`."""
    return tuple(x.sum(1).reshape(-1, world.group_size).sum(1) for x in (weights * chosen, of))


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The ranks and weights that a subject gives to all rollouts."""

    ranks: Tensor  # [B, T], by which the tokens of a rollout are ranked.
    weights: Tensor | None  # [B, T], the factor of the advantage, an additive stage included; None for a bare score.
    seconds: float  # Of the processor for 1,000 rollouts, the median over batches.


def by_outcome(rho: Tensor, truth: str, world: World) -> dict[str, Sums]:
    """A rank correlation ``[B]`` in wrong and in right rollouts."""
    chosen = {"wrong": world.wrong, "right": world.right}
    return {
        f"rho ({truth}): {name}": by_prompt(torch.where(rows, rho, torch.nan), world) for name, rows in chosen.items()
    }


def detection(lines: Tensor, world: World) -> dict[str, Sums]:
    """Flawed against sound lines ``[B, S]`` of the same rollout."""
    kind, measured = world.lines.kind, world.wrong[:, None] & ~lines.isnan()
    areas = {error: pairwise_auroc(lines, kind[error] & measured, kind["sound"] & measured) for error in world.forks}
    return {f"in rollout: {error}": by_prompt(area, world) for error, area in areas.items()}


def credit_columns(credit: Credit, world: World) -> dict[str, Sums]:
    """All columns of a subject."""
    lines, earned = world.lines.of(credit.ranks), world.earned.mean(0)
    columns = detection(lines, world)
    columns |= by_outcome(rank_correlation(lines, earned, world.lines.known & ~earned.isnan()), "b", world)
    if world.effect is not None:
        reasoning = scoped_tokens(world.batch, "reasoning")
        columns |= by_outcome(rank_correlation(credit.ranks, world.effect, reasoning), "a", world)
    # Weights can be compared between rollouts; raw scores differ in scale.
    comparable = credit.ranks if credit.weights is None else credit.weights
    values = world.lines.of(comparable) if world.lines.mean else comparable
    for error, pairs in world.forks.items():
        place = pairs.line if world.lines.mean else pairs.token
        columns[f"at fork: {error}"] = pairs.wins(*values[pairs.row, place])
    if credit.weights is not None:
        for name, mask in world.kinds.items():
            inside = (mask & world.wrong[:, None]).double()
            columns[f"weight: {name}"] = share(credit.weights, inside, inside, world)
        if world.flawed is not None:
            blame = credit.weights.abs().double() * (world.wrong & world.flawed.any(1))[:, None]
            columns["flawed"] = share(blame, world.flawed, blame, world)
    return columns


def gain_columns(world: World) -> dict[str, Sums]:
    """The resampled truth itself; its agreement is that of its two halves."""
    one, other = world.earned
    mean = (one + other) / 2
    columns = detection(mean, world) | {
        f"at fork: {error}": pairs.wins(*mean[pairs.row, pairs.line]) for error, pairs in world.forks.items()
    }
    return columns | by_outcome(rank_correlation(one, other, world.lines.known & ~mean.isnan()), "b", world)


@dataclass(frozen=True)
class Table:
    """Prints a table line by line."""

    draws: Tensor  # Of the bootstrap over prompts, from `resamplings`.
    columns: tuple[str, ...]
    tokens: bool  # Whether it has a column of the tokens that a method sampled.

    def head(self) -> None:
        names = ["method", "by", *self.columns, *(["tokens"] if self.tokens else []), "s / 1,000"]
        print(f"| {' | '.join(names)} |\n|---|---|{'--:|' * (len(names) - 2)}")

    def row(self, name: str, by: str, columns: dict[str, Sums], seconds: float, tokens: float = 0.0) -> None:
        """Print a line; `tokens` is the number of sampled tokens over that of the rollouts."""
        cells = [over_prompts(columns[c], self.draws) if c in columns else "-" for c in self.columns]
        cells += [f"{tokens:.1f}" if tokens else "0"] if self.tokens else []
        print(f"| {' | '.join([name, by, *cells, f'{seconds:.2f}'])} |", flush=True)
