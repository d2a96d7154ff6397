r"""Sampling options, and the rollouts of a training step, which are sampled, then graded, then ready for training.

Shapes: ``B`` rows (rollouts), ``P`` prompt tokens, ``T`` response tokens, ``W`` columns. Masks: bool, True counts.

One row as an example. The prompt ``Compute 2+3.`` has 5 tokens, and the response ``2+3=5\n\boxed{5}<end>`` has 11. The
batch has ``P = 6`` and ``T = 12`` because other rows are longer::

    input_ids       pad | Compute 2 + 3 . |  2 + 3 = 5 \n \boxed {  5 } <end> pad      [P+T]
    attention_mask   0  |   1     1 1 1 1 |  1 1 1 1 1  1    1   1  1 1   1    0        [P+T]
    response_ids                             2 + 3 = 5 \n \boxed {  5 } <end> pad      [T]
    response_mask                            1 1 1 1 1  1    1   1  1 1   1    0        [T]
    answer.whole                             0 0 0 0 0  0    1   1  1 1   0    0        [T]
    answer.marker                            0 0 0 0 0  0    1   1  0 1   0    0        [T]
    answer.content                           0 0 0 0 0  0    0   0  1 0   0    0        [T]
    answer.after                             0 0 0 0 0  0    0   0  0 0   1    0        [T]

Prompts are padded on the left and responses on the right, so all responses begin at the same column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from grail_lightning.answers.records import UNSCORED, Verdict
from grail_lightning.core.records.episode import Episode, one_turn
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.runtime.checks import check_options

_WHOLE_ROWS = ("input_ids", "attention_mask")  # The fields whose columns are prompt and response.


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Options with which responses are sampled. Training and evaluation have one set each.

    Attributes:
        max_response_length: Most tokens of a response, its end token included.
        temperature: The number by which the logits are divided. 0 is greedy; log-probabilities are then reported at
            temperature 1.
        top_p: Samples from the smallest set of tokens with at least this probability; 1 is off.
        top_k: Samples from this number of most likely tokens; 0 is off.
        stop: Strings that end a response and stay part of it. They may be special tokens (``<|im_end|>``).
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_options(self, max_response_length="[1, inf)", temperature="[0, inf)", top_p="(0, 1]", top_k="[0, inf)")
        if isinstance(self.stop, str):  # type: ignore[unreachable]
            raise ValueError(
                f"`stop` must be a list of strings, but got the string {self.stop!r}. Write [{self.stop!r}]."
            )
        if "" in self.stop:
            raise ValueError(f"`stop` must hold strings of at least one character, but got {list(self.stop)}.")

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which log-probabilities are computed."""
        return self.temperature or 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerMasks:
    r"""The positions of each row's answer among its response tokens; four bool tensors ``[B, T]``.

    A token that overlaps both a brace and the content is in both `content` and `marker`.
    """

    whole: Tensor  # Tokens that overlap the answer with what marks it, such as the complete box.
    content: Tensor  # Of these, tokens that overlap the answer itself, such as the text between the box's braces.
    marker: Tensor  # Of these, tokens that overlap what marks it, such as \boxed{ and the closing brace, or ####.
    after: Tensor  # Valid tokens after the answer.


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledBatch:
    """Responses as an engine returns them; rows of one group are neighbours. The module's docstring shows a row.

    The ids of a whole batch are int32; `select` returns long ids, with which torch can index.
    """

    input_ids: Tensor  # [B, P+T], prompts padded left, responses padded right.
    attention_mask: Tensor  # [B, P+T] bool, True on valid tokens.
    response_ids: Tensor  # [B, T], the sampled ids, with the dtype of `input_ids`; nothing is re-tokenised.
    # [B, T] bool, True on sampled tokens, the end token included. Between turns it has gaps: what an environment
    # answered is valid (`valid_mask`), but was not sampled.
    response_mask: Tensor
    group: Tensor  # [B] long, the index on this rank of the prompt that a row answers.
    row: Tensor  # [B] long, a row's identity within the training step, over all ranks; a key of its random numbers.
    finished: Tensor  # [B] bool, whether the response ended by itself within the limit.
    prompts: list[Prompt]  # One for each row.
    texts: list[str]  # The responses as text, without special tokens.
    # [B, T], the engine's log-probabilities at `Sampling.logprob_temperature`, before top-p and top-k, if it has them;
    # NaN where it reported none for a token.
    sampling_logprobs: Tensor | None = None
    # [B, T] long, the number of the turn of each valid token, from 0; what the environment answers to a turn counts as
    # part of it. None if every response is one turn, as it is without an environment.
    turn: Tensor | None = None
    episodes: list[Episode] | None = None  # One for each row: the turns as text, with their calls and results.

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def prompt_width(self) -> int:
        """P: the columns of `input_ids` before the first response column."""
        return self.input_ids.shape[1] - self.response_ids.shape[1]

    @property
    def valid_mask(self) -> Tensor:
        """``[B, T]`` bool: all tokens after the prompt, sampled or put in by an environment; padded on the right."""
        return self.attention_mask[:, self.prompt_width :]

    @property
    def valid_lengths(self) -> Tensor:
        """``[B]`` long: the number of tokens of each row after its prompt; with one turn that of sampled tokens."""
        return self.valid_mask.sum(1)

    @property
    def response_lengths(self) -> Tensor:
        """``[B]`` long: the number of sampled tokens of each row."""
        return self.response_mask.sum(1)

    @property
    def prompt_lengths(self) -> Tensor:
        """``[B]`` long: the number of prompt tokens of each row."""
        return self.attention_mask[:, : self.prompt_width].sum(1)

    @property
    def lengths(self) -> Tensor:
        """``[B, 2]`` long: for each row the number of prompt tokens and of tokens after the prompt, without padding."""
        return torch.stack([self.prompt_lengths, self.valid_lengths], 1)

    @property
    def in_environment(self) -> list[bool]:
        """For each row, whether an environment takes part: its task has one, or its response shows it.

        `turn` and `episodes` exist for all rows as soon as one row needs them, and say nothing about the others.
        """
        if self.turn is None:
            return [False] * len(self)
        told = self.valid_mask & ~self.response_mask
        answered = (told | (self.valid_mask & (self.turn > 0))).any(1).tolist()
        return [reply or prompt.task.has_environment for reply, prompt in zip(answered, self.prompts, strict=True)]

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in the named fields."""
        return dataclasses.replace(self, **changes)

    def fields(self) -> dict[str, Any]:
        """The values by name, from which the next stage of the batch is made."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def select(self, rows: Tensor) -> Self:
        """The given rows (``[n]`` long), trimmed to their own longest prompt and response."""
        width, numbers = self.prompt_width, rows.tolist()
        taken = rows.to(self.input_ids.device)
        prompt = int(self.prompt_lengths[taken].max()) if numbers else 0
        response = int(self.valid_lengths[taken].max()) if numbers else 0
        columns = slice(width - prompt, width + response)

        def cut(name: str, value: Tensor) -> Tensor:
            if value.ndim == 1:
                return value[taken]
            cells = value[taken, columns if name in _WHOLE_ROWS else slice(0, response)]
            return cells.long() if name in ("input_ids", "response_ids") else cells

        changed = {name: _map_tensors(name, value, cut) for name, value in self.fields().items()}
        lists = {name: [value[k] for k in numbers] for name, value in changed.items() if isinstance(value, list)}
        return dataclasses.replace(self, **changed | lists)

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""
        moved = {name: _map_tensors(name, value, lambda _, t: t.to(device)) for name, value in self.fields().items()}
        return dataclasses.replace(self, **moved)


def on_cpu(batch: SampledBatch) -> SampledBatch:
    """What was sampled, with every tensor on the CPU, and nothing of its rewards."""
    names = [f.name for f in dataclasses.fields(SampledBatch)]
    return SampledBatch(**{name: getattr(batch, name) for name in names}).to("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedBatch(SampledBatch):
    """Responses with their rewards and the positions of their answers."""

    answer: AnswerMasks
    rewards: Tensor  # [B] float64; NaN for a response that nothing scored, which no mean and no comparison survives.
    correct: Tensor  # [B] bool
    verdicts: list[Verdict]  # One for each row.
    # [B] float64 by name, the parts of the rewards before weighting; NaN means not applicable.
    reward_values: dict[str, Tensor] = field(default_factory=dict)
    # [B] float64 by the same names, their factors in the reward; NaN means not applicable.
    reward_weights: dict[str, Tensor] = field(default_factory=dict)
    # [B] float64 by name, what is logged of rewards beside the means of their values; NaN means not applicable.
    reward_shares: dict[str, Tensor] = field(default_factory=dict)

    @property
    def scored(self) -> Tensor:
        """``[B]`` bool: rows that have a reward. The others are in no statistic of rewards and are not trained on."""
        return ~self.rewards.isnan()

    @property
    def judged(self) -> Tensor:
        """``[B]`` bool: rows that are right or wrong. The others, whose *verdict* is `unscored`, are in no accuracy."""
        has_verdict = [verdict.status != UNSCORED for verdict in self.verdicts]
        return torch.tensor(has_verdict, dtype=torch.bool, device=self.correct.device)

    def with_advantages(self, advantages: Tensor) -> RolloutBatch:
        """The batch with advantages ``[B]`` float32, as credit methods and the update take it."""
        return RolloutBatch(**self.fields(), advantages=advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch(GradedBatch):
    """Rollouts that are ready for training."""

    advantages: Tensor  # [B] float32

    @property
    def wrong(self) -> Tensor:
        """``[B]`` bool: wrong rollouts of groups that are trained on, with or without an advantage of their own."""
        return ~self.correct & self.scored & torch.isin(self.group, self.group[self.advantages != 0])


def _map_tensors(name: str, value: object, change: Callable[[str, Tensor], Tensor]) -> Any:
    """A field of a batch with `change` applied to each of its tensors; other values are unchanged."""
    match value:
        case Tensor():
            return change(name, value)
        case dict():
            return {key: change(key, part) for key, part in value.items()}
        case AnswerMasks():
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return AnswerMasks(**{key: change(key, part) for key, part in fields.items()})
        case _:
            return value


# --- rows -------------------------------------------------------------------------------------------------------------

_Batch = TypeVar("_Batch", bound=SampledBatch)


def join(first: _Batch, second: _Batch) -> _Batch:
    """The rows of both batches, padded to common widths.

    If one batch alone has rollouts of several turns, the responses of the other are rollouts of one turn.
    """
    if (first.turn is None) != (second.turn is None):
        first, second = _with_turns(first), _with_turns(second)
    prompt = max(first.prompt_width, second.prompt_width)
    response = max(first.response_ids.shape[1], second.response_ids.shape[1])

    def widen(name: str, value: Tensor, batch: _Batch) -> Tensor:
        if value.ndim < 2:
            return value
        padding = prompt - batch.prompt_width if name in _WHOLE_ROWS else 0
        return F.pad(value, (padding, response - batch.response_ids.shape[1]))

    def both(name: str, value: Any, other: Any) -> Any:
        match value:
            case Tensor():
                return torch.cat([widen(name, value, first), widen(name, other, second)])
            case list():
                return value + other
            case AnswerMasks():
                names = [f.name for f in dataclasses.fields(value)]
                return AnswerMasks(**{n: both(n, getattr(value, n), getattr(other, n)) for n in names})
            case dict():
                # Tasks may differ in the parts of their rewards; NaN means not applicable.
                rows = {key: (_or_nan(value, key, first), _or_nan(other, key, second)) for key in value | other}
                return {key: torch.cat(parts) for key, parts in rows.items()}
            case _:
                return value

    others = second.fields()
    return first.replace(**{name: both(name, value, others[name]) for name, value in first.fields().items()})


def _with_turns(batch: _Batch) -> _Batch:
    """The batch with `turn` and `episodes`: a response without an environment is one turn."""
    if batch.turn is not None:
        return batch
    episodes = list(map(one_turn, batch.texts, batch.finished.tolist()))
    return batch.replace(turn=torch.zeros_like(batch.response_ids, dtype=torch.long), episodes=episodes)


def _or_nan(values: dict[str, Tensor], key: str, batch: SampledBatch) -> Tensor:
    missing = torch.full((len(batch),), torch.nan, dtype=torch.float64, device=batch.input_ids.device)
    return values.get(key, missing)


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Lists of token ids as ``ids [B, W]`` and ``mask [B, W]``, padded on the left."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], dtype=torch.long)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], dtype=torch.bool)
    return ids.reshape(len(rows), width), mask.reshape(len(rows), width)


def lengths_to_mask(lengths: Tensor, width: int) -> Tensor:
    """``[B]`` lengths as a ``[B, width]`` bool mask that is True on the first columns."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def micro_batches(costs: Tensor, token_budget: int, rows: Tensor | None = None) -> list[Tensor]:
    """Cut rows into micro-batches whose padded size is within a token budget; the rows of each are ascending.

    Rows are sorted by length, longest first, so that a lack of memory shows in the first micro-batch. Rows are added to
    a micro-batch as long as ``number of rows × longest row ≤ token_budget``. A row longer than the budget has a
    micro-batch of its own.

    `costs` are the tokens of each row, ``[B]``; or ``[B, C]`` for parts that are padded separately, such as prompt and
    response: the longest row is then the sum of the longest parts. Without ``rows [n]`` all rows are cut.
    """
    if rows is None:
        rows = torch.arange(len(costs))
    parts, rows = costs.cpu().reshape(len(costs), -1), rows.cpu()
    order = rows[torch.argsort(parts.sum(1)[rows], descending=True, stable=True)]
    cuts: list[list[int]] = []
    longest = parts.new_zeros(parts.shape[1])
    for row in order.tolist():
        grown = torch.maximum(longest, parts[row])
        if not cuts or (len(cuts[-1]) + 1) * int(grown.sum()) > token_budget:
            cuts.append([])
            grown = parts[row]
        cuts[-1].append(row)
        longest = grown
    return [torch.tensor(sorted(cut), dtype=torch.long) for cut in cuts]


def last_marked(mask: Tensor) -> Tensor:
    """``[B]`` long: the last True column of each row of ``[B, T]``, counted from 1; 0 for a row without one."""
    return (torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask).amax(1)


def cut_responses(batch: _Batch, ends: Tensor) -> _Batch:
    """The batch with each response ending before column `ends` ``[B]``; the number of columns is unchanged."""
    span = lengths_to_mask(ends, batch.response_mask.shape[1])
    attention = torch.cat([batch.attention_mask[:, : batch.prompt_width], batch.valid_mask & span], 1)
    return batch.replace(response_mask=batch.response_mask & span, attention_mask=attention)
