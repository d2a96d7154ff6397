r"""The records that travel through a training step, and how they are trimmed and cut.

Shapes: ``B`` rows (rollouts), ``P`` prompt tokens, ``T`` response tokens. Masks are bool and True counts.

One row, by example. The prompt ``Compute 2+3.`` has 5 tokens, the response ``2+3=5\n\boxed{5}<end>`` has 11; the
batch has ``P = 6`` and ``T = 12`` because other rows are longer::

    input_ids       pad | Compute 2 + 3 . |  2 + 3 = 5 \n \boxed {  5 } <end> pad      [P+T]
    attention_mask   0  |   1     1 1 1 1 |  1 1 1 1 1  1    1   1  1 1   1    0        [P+T]
    response_ids                             2 + 3 = 5 \n \boxed {  5 } <end> pad      [T]
    response_mask                            1 1 1 1 1  1    1   1  1 1   1    0        [T]
    answer.whole                             0 0 0 0 0  0    1   1  1 1   0    0        [T]
    answer.marker                            0 0 0 0 0  0    1   1  0 1   0    0        [T]
    answer.content                           0 0 0 0 0  0    0   0  1 0   0    0        [T]
    answer.after                             0 0 0 0 0  0    0   0  0 0   1    0        [T]

Prompts are padded on the left and responses on the right, so the border between them is one column for all rows.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

StepKind = Literal["sound", "slip", "misconception", "inherited", "filler"]
Messages = list[dict[str, str]]


class GradedAnswer(Protocol):
    """What a task sees of a verdict: `grail_lightning.answers.Verdict` has these fields, and more."""

    @property
    def correct(self) -> bool:
        """Whether the answer equals the reference."""

    @property
    def status(self) -> str:
        """One of right, wrong, missing, capped, unparseable, timeout, crashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A range of characters of a response and what the task knows about it.

    ``slip``: wrong, at random. ``misconception``: wrong, in a systematic way. ``inherited``: right in itself, but
    computed from an earlier wrong result. ``filler``: carries no reasoning. ``result`` is the range of the characters
    in which the error shows, if any (for ``7+5=13`` the ``13``).
    """

    start: int
    stop: int
    kind: StepKind
    result: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Earned:
    """What responses earned.

    Attributes:
        total: One finite number a response: its reward.
        values: The parts of it by name, before weighting; None where a part has no opinion. They are logged.
    """

    total: list[float]
    values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


class Task(ABC):
    """What a problem is: its prompt, how an answer is read from a text, and what it earns."""

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """One dataset row as a prompt that carries this task."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """The bare answer that a response gives, without its box; None if it gives none."""

    @abstractmethod
    def reward(self, texts: Sequence[str], prompts: Sequence[Prompt], verdicts: Sequence[GradedAnswer]) -> list[float]:
        """One reward a response. Called for all responses of one batch that belong to this task."""

    def earn(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int],
    ) -> Earned:
        """What the trainer asks: `reward`, and its parts where a task has several.

        Args:
            texts: The responses of one batch that belong to this task.
            prompts: One a response.
            verdicts: One a response.
            lengths: Generated tokens of each, the end token included.
        """
        return Earned(total=self.reward(texts, prompts, verdicts))

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """The steps of a response with their labels, where the task can tell them; else None."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem as it is put to the policy. The task travels with it, so mixed datasets grade themselves.

    Attributes:
        messages: A conversation (``[{"role": …, "content": …}]``, through the chat template) or plain text.
        reference: The bare reference answer.
        task: Grades the responses.
        columns: Further columns of the dataset row, for rewards and tables.
        dataset: Under which name metrics are reported.
    """

    messages: Messages | str
    reference: str
    task: Task
    columns: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""

    def to(self, device: Any) -> Self:
        """Itself: no tensors inside. Lightning moves what has this method, and refuses other frozen records."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How responses are drawn. Training and evaluation have one each.

    Attributes:
        max_response_length: Most tokens of a response, its end token included.
        temperature: Divides the logits. 0 is greedy; log-probabilities are then reported at temperature 1.
        top_p: Smallest set of tokens with at least this probability; 1 is off.
        top_k: Most likely tokens kept; 0 is off.
        stop: Strings that end a response, special tokens (``<|im_end|>``) among them; the string itself stays in it.
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_response_length < 1:
            raise ValueError(f"`max_response_length` must be at least 1 token, but got {self.max_response_length}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be 0 (greedy) or positive and finite, but got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie in (0, 1], but got {self.top_p}. Use 1 to switch it off.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be 0 (off) or positive, but got {self.top_k}.")
        if isinstance(self.stop, str):  # type: ignore[unreachable]
            raise ValueError(
                f"`stop` must be a list of strings, but got the string {self.stop!r}. Write [{self.stop!r}]."
            )
        if "" in self.stop:
            raise ValueError(f"`stop` must hold strings of at least one character, but got {list(self.stop)}.")

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which log-probabilities are taken."""
        return self.temperature or 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerMasks:
    r"""Where the answer of each row stands among its response tokens; four bool tensors ``[B, T]``.

    Attributes:
        whole: Tokens that overlap the complete box, marker and closing brace included.
        content: Tokens of the box that overlap what stands between its braces.
        marker: Tokens of the box that overlap the ``\boxed{`` or the closing brace; a token that straddles brace and
            content is in both `content` and `marker`.
        after: Valid tokens behind the box.
    """

    whole: Tensor
    content: Tensor
    marker: Tensor
    after: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Sampled responses; rows of one group are neighbours. See the module's docstring for a worked row.

    Attributes:
        input_ids: ``[B, P+T]``; prompts padded left, responses padded right. int32 in a whole batch, long in what
            `select` cuts out of it: torch indexes with longs.
        attention_mask: ``[B, P+T]`` bool.
        response_ids: ``[B, T]``, the sampled ids themselves, likewise; nothing is re-tokenised.
        response_mask: ``[B, T]`` bool, True on generated tokens, the end token included.
        group: ``[B]`` long, which prompt of the batch a row answers.
        row: ``[B]`` long, a row's identity within the step over all ranks; it keys per-row random numbers.
        finished: ``[B]`` bool, whether the row ended by itself within the limit.
        prompts: One per row.
        texts: The responses as text, special tokens left out.
        answer: Where the answers stand; None before they are located.
        rewards: ``[B]`` float32; None before grading.
        correct: ``[B]`` bool; None before grading.
        reward_values: ``[B]`` float32 by name, the parts of the rewards before weighting; NaN is no opinion.
        advantages: ``[B]`` float32; None before they are computed.
        old_logprobs: ``[B, T]`` under the weights that sampled, by the training forward pass.
        ref_logprobs: ``[B, T]`` under the frozen reference.
        sampling_logprobs: ``[B, T]`` as the engine reports them: at `Sampling.logprob_temperature`, before top-p/top-k.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    group: Tensor
    row: Tensor
    finished: Tensor
    prompts: list[Prompt]
    texts: list[str]
    answer: AnswerMasks | None = None
    rewards: Tensor | None = None
    correct: Tensor | None = None
    reward_values: dict[str, Tensor] = field(default_factory=dict)
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    sampling_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def prompt_width(self) -> int:
        """P: columns of `input_ids` in front of the first response column."""
        return self.input_ids.shape[1] - self.response_ids.shape[1]

    @property
    def response_lengths(self) -> Tensor:
        """``[B]`` long: generated tokens of each row."""
        return self.response_mask.sum(1)

    @property
    def prompt_lengths(self) -> Tensor:
        """``[B]`` long: prompt tokens of each row."""
        return self.attention_mask[:, : self.prompt_width].sum(1)

    @property
    def lengths(self) -> Tensor:
        """``[B, 2]`` long: prompt and response tokens of each row, which are padded apart."""
        return torch.stack([self.prompt_lengths, self.response_lengths], 1)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in the named fields."""
        return dataclasses.replace(self, **changes)

    def select(self, rows: Tensor) -> Self:
        """The given rows (``[n]`` long), trimmed to their own longest prompt and response."""
        width, kept = self.prompt_width, rows.tolist()
        taken = rows.to(self.input_ids.device)
        prompt = int(self.prompt_lengths[taken].max()) if kept else 0
        response = int(self.response_lengths[taken].max()) if kept else 0
        columns = slice(width - prompt, width + response)

        def cut(name: str, value: Any) -> Any:
            match value:
                case Tensor() if name == "input_ids":
                    return value[taken, columns].long()
                case Tensor() if name == "response_ids":
                    return value[taken, :response].long()
                case Tensor() if name == "attention_mask":
                    return value[taken, columns]
                case Tensor() if value.ndim == 2:
                    return value[taken, :response]
                case Tensor():
                    return value[taken]
                case list():
                    return [value[k] for k in kept]
                case dict():
                    return {key: cut(key, part) for key, part in value.items()}
                case AnswerMasks():
                    return AnswerMasks(
                        **{f.name: cut(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)}
                    )
                case _:
                    return value

        return dataclasses.replace(
            self, **{f.name: cut(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)}
        )

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""

        def move(value: Any) -> Any:
            match value:
                case Tensor():
                    return value.to(device)
                case dict():
                    return {key: move(part) for key, part in value.items()}
                case AnswerMasks():
                    return AnswerMasks(**{f.name: move(getattr(value, f.name)) for f in dataclasses.fields(value)})
                case _:
                    return value

        return dataclasses.replace(self, **{f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)})


class Mean(NamedTuple):
    """A mean as the two numbers it is made of: ranks may differ in size, so their means cannot be averaged.

    Attributes:
        total: The sum over this rank.
        size: How many rows or tokens were added up; 0 where there was none.
    """

    total: float
    size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """Credit of each token.

    Attributes:
        values: ``[B, T]``, multiplies the rollout's advantage; zero outside the response mask.
        scores: ``[B, T]``, the raw scores behind the weights, if there are any.
        additive: ``[B, T]``, added to the token's advantage after the product, if the method has such a stage.
        fallback: ``[B]`` bool, rows to which the method applied but could not (no complete box): their weight is 1.
        answer: Where the method saw the answer, if not where the batch has it.
        metrics: Further figures to log under ``credit/``: a number is a mean over this rank's rows, or one that all
            ranks share; means over anything else, such as tokens, are a `Mean`. NaN is no opinion.
        parts: The weights of the methods that this one is made of, if any (`grail_lightning.credit.base.weigh_part`).
    """

    values: Tensor
    fallback: Tensor
    scores: Tensor | None = None
    additive: Tensor | None = None
    answer: AnswerMasks | None = None
    metrics: Mapping[str, float | Mean] = field(default_factory=dict)
    parts: tuple[TokenWeights, ...] = ()


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
    """Cut rows into micro-batches whose padded size stays within a token budget.

    Rows are sorted by length, longest first (so that a memory overrun shows at once), and a micro-batch takes rows as
    long as ``number of rows × longest row ≤ token_budget``. A row longer than the budget travels alone.

    Args:
        costs: ``[B]`` long, tokens of each row; or ``[B, C]`` for parts that are padded apart, such as prompt and
            response: the longest row is then the sum of the longest parts.
        token_budget: Most padded tokens of a micro-batch.
        rows: ``[n]`` long, the rows to cut; default all.

    Returns:
        Row indices of each micro-batch, each sorted ascending.

    Raises:
        ValueError: If the budget is not positive.
    """
    if token_budget < 1:
        raise ValueError(f"`token_budget` must be at least 1 token, but got {token_budget}.")
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
