"""SketchVL's FinePO: a rollout's advantage is moved between its spans by their scores.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.credit.base import (
    CreditContext,
    Mean,
    TokenCredit,
    TokenWeights,
    one_elsewhere,
    rows_by_group,
)
from grail_lightning.core.credit.turns import check_judged, check_scored, turn_scores, turn_table
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.rollout.grading import align_rows, located_steps
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.import_path import import_function
from grail_lightning.gallery.critic import Judge

_Scores = Literal["given", "permuted", "random"]
_EPS = 1e-8


class ScoredSpan(NamedTuple):
    """A range of characters of a response, ``text[start:stop]``, with its score.

    Attributes:
        start: The first character.
        stop: The character behind the last one.
        score: Any finite number; larger is better.
        kind: The kind of action, for `SpanScores.debias`.
    """

    start: int
    stop: int
    score: float
    kind: str = ""


class _Span(NamedTuple):
    tokens: list[int]
    score: float
    kind: str = ""


_Scorer = Callable[[str, Prompt], Sequence[ScoredSpan]]


@dataclass(eq=False)
class SpanScores(TokenCredit):
    r"""Moves the advantage of a rollout between its spans, towards those that a scorer prefers.

    .. math:: w_t = \mathrm{clip}\Bigl(1 + \alpha\, \mathrm{sign}(A_i)\, \frac{\Delta_j}{\max_k \Delta_k + \varepsilon},
              \ 0,\ \beta\Bigr), \qquad \Delta_j = p_j - \frac{\sum_k L_k p_k}{\sum_k L_k}

    Token ``t`` is of span ``j`` with the score ``p_j`` and ``L_j`` tokens; tokens outside of all spans keep weight 1.
    A good span of a right rollout is praised more, a bad one of a wrong rollout is blamed more. Before the clip alone
    the sum of the weights stays the same; `credit/clipped` is what the clip changes, a token of a span. A row without
    a span is uniform and counts as a fallback.

    Spans are the turns that an environment scores, and in a rollout without an environment the results of the steps
    that its task labels: 1 for a sound or inherited one, 0 for a slip or a misconception. Both read the reference, so
    that the method is an oracle with them. A function ``scorer(response, prompt)`` returns `ScoredSpan` without
    overlaps; of a rollout of several turns it reads the last one. A judge labels turns with 1 and 0, and leaves other
    rollouts uniform. `scores` has two controls, in which a span keeps its place: *permuted* within the rollout, and
    *random*, drawn with replacement from the scores of the group.

    `debias` subtracts what a kind of action has for its frequency alone: ``p'_j = p_j + clip(−λ log(q_k / u), −γ, γ)``
    with ``q_k`` the share of the kind among the spans of the group and ``u`` the share if all its kinds were as
    frequent.

    Args:
        scorer: task | the import path of a function.
        alpha: α; 0 is uniform credit.
        beta: β, the largest weight.
        scores: given | permuted | random.
        debias: λ.
        most_bias: γ.
        judge: The options of a judge, which then scores turns in place of the task. Nothing is sent without it.

    Source: SketchVL, arXiv 2601.05688, which does not state α and β; in its table random scores do as well as those of
    the trained scorer. What `debias` compares with is ours.
    """

    runs_policy = False

    scorer: str | _Scorer = "task"
    alpha: float = 1.0
    beta: float = 2.0
    scores: _Scores = "given"
    debias: float = 0.0
    most_bias: float = 1.0
    judge: Judge | None = None

    def __post_init__(self) -> None:
        check_options(self, alpha="[0, inf)", beta="[1, inf)", scores=_Scores, debias="[0, inf)", most_bias="[0, inf)")
        if self.judge is not None and self.scorer != "task":
            raise ValueError(
                f"`judge` takes the place of `scorer`, but got both: {self.scorer!r}. Leave one of `credit.judge` and "
                "`credit.scorer` out."
            )
        built_in: dict[str, Any] = {"task": None}  # It is no function of a text.
        self._score = import_function(self.scorer, built_in, "`credit.scorer`", "my_package.scores.of_steps")

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: of rollouts of several turns, an environment or a judge scores turns."""
        uniform = "Their rollouts are uniform."
        if self.judge is not None:
            return check_judged(self, sets, uniform)
        played = [prompts for prompts in sets if len(prompts) and prompts[0].task.has_environment]
        if self._score is not None or not played:  # Whether a task labels steps, responses show.
            return ""
        return check_scored(self, played, uniform, needed=len(played) == sum(len(prompts) > 0 for prompts in sets))

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the scores of spans."""
        rows = self._rescored(self._spans(policy, batch), batch, context)
        values = torch.ones(batch.response_mask.shape, dtype=torch.float64)
        inside = torch.zeros(batch.response_mask.shape, dtype=torch.bool)
        clipped = 0.0
        for row, (spans, sign) in enumerate(zip(rows, batch.advantages.sign().tolist(), strict=True)):
            sizes = [len(span.tokens) for span in spans]
            # From the first score, so that equal ones have no differences by rounding, however large they are.
            scores = [span.score - spans[0].score for span in spans]
            mean = sum(n * score for n, score in zip(sizes, scores, strict=True)) / max(sum(sizes), 1)
            largest = max((score - mean for score in scores), default=0.0)
            for size, span, score in zip(sizes, spans, scores, strict=True):
                weight = 1 + self.alpha * sign * (score - mean) / (largest + _EPS)
                within = min(max(weight, 0.0), self.beta)
                values[row, span.tokens] = within
                inside[row, span.tokens] = True
                clipped += size * abs(weight - within)
        values, inside = values.to(batch.response_mask.device), inside.to(batch.response_mask.device)
        return TokenWeights(
            values=one_elsewhere(values, inside, batch.response_mask).to(batch.advantages.dtype),
            fallback=~inside.any(1),
            metrics={
                "clipped": Mean(clipped, float(inside.sum())),
                "span_tokens": Mean(float(inside.sum()), float(batch.response_mask.sum())),
            },
        )

    def _spans(self, policy: Policy, batch: RolloutBatch) -> list[list[_Span]]:
        """The spans of each row, with at least one token each."""
        if self._score is not None:
            rows = []
            for aligned, prompt in zip(align_rows(batch, policy.tokenizer), batch.prompts, strict=True):
                spans = _checked(self._score(aligned.text, prompt), len(aligned.text))
                rows.append([_Span(aligned.overlapping(s.start, s.stop), float(s.score), s.kind) for s in spans])
        elif self.judge is not None:
            rows = self._turns(policy, batch)
        else:
            good = {"sound": 1.0, "inherited": 1.0, "slip": 0.0, "misconception": 0.0}  # Filler carries no reasoning.
            played = batch.in_environment
            steps = located_steps(batch, policy.tokenizer, ~torch.tensor(played, dtype=torch.bool))
            of_steps = [[_Span(s.tokens, good[s.kind]) for s in row or [] if s.kind in good] for row in steps]
            both = zip(self._turns(policy, batch), of_steps, played, strict=True)
            rows = [turns if is_played else labelled for turns, labelled, is_played in both]
        return [_apart(row) for row in rows]

    def _turns(self, policy: Policy, batch: RolloutBatch) -> list[list[_Span]]:
        """The turns that have a score, of an environment or of the judge."""
        turns = turn_table(batch)
        scores, numbers = turn_scores(batch, turns.exists.cpu()), turns.numbers.cpu()
        labels = self.judge.labels(policy, batch) if self.judge is not None else None
        rows: list[list[_Span]] = [[] for _ in range(len(batch))]
        for row, episode in enumerate(batch.episodes or ()):
            of_turns = dict(enumerate(scores[row].tolist())) if labels is None else labels.get(row, {})
            for k, score in of_turns.items():
                # A judge labels turns that call; it may say something of others, too.
                labelled = k < len(episode.turns) and (labels is None or episode.turns[k].calls)
                if labelled and not math.isnan(score):
                    calls, tokens = episode.turns[k].calls, (numbers[row] == k).nonzero().flatten().tolist()
                    rows[row].append(_Span(tokens, float(score), calls[0].name if calls else ""))
        return rows

    def _rescored(self, rows: list[list[_Span]], batch: RolloutBatch, context: CreditContext) -> list[list[_Span]]:
        """The spans with scores less the bias of their kind in the group (`debias`), or with those of a control."""
        changed, names, most = list(rows), batch.row.tolist(), self.most_bias
        for group in map(Tensor.tolist, rows_by_group(batch)):
            of_kind = Counter(span.kind for row in group for span in rows[row])
            total = of_kind.total()
            bias = {
                kind: min(max(-self.debias * math.log(n * len(of_kind) / total), -most), most)
                for kind, n in of_kind.items()
            }
            scores = {row: [span.score + bias[span.kind] for span in rows[row]] for row in group}
            pool = list(chain.from_iterable(scores.values()))
            for row, row_scores in scores.items():
                generator = context.row_generator(names[row])
                if self.scores == "permuted":
                    row_scores = [row_scores[k] for k in torch.randperm(len(row_scores), generator=generator).tolist()]
                elif self.scores == "random":
                    picks = torch.randint(max(len(pool), 1), (len(row_scores),), generator=generator)
                    row_scores = [pool[k] for k in picks.tolist()]
                changed[row] = [span._replace(score=score) for span, score in zip(rows[row], row_scores, strict=True)]
        return changed


def _apart(spans: list[_Span]) -> list[_Span]:
    """The spans that have tokens of their own: a token across a border belongs to the first."""
    taken: set[int] = set()
    disjoint_spans = []
    for span in spans:
        tokens = [token for token in span.tokens if token not in taken]
        taken.update(tokens)
        disjoint_spans += [span._replace(tokens=tokens)] if tokens else []
    return disjoint_spans


def _checked(spans: Iterable[Sequence[Any]], length: int) -> list[ScoredSpan]:
    try:
        ordered = sorted(ScoredSpan(*span) for span in spans)
        ends = [0, *(span.stop for span in ordered)]
        right = all(
            end <= span.start <= span.stop <= length and math.isfinite(span.score)
            for end, span in zip(ends, ordered, strict=False)
        )
    except TypeError:
        right = False
    if not right:
        raise ValueError(
            "`credit.scorer` must return `ScoredSpan(start, stop, score)` of grail_lightning.core.credit for ranges of "
            f"characters, 0 ≤ start ≤ stop ≤ {length}, that do not overlap, with finite scores, but got "
            f"{str(spans)[:200]}."
        )
    return ordered
