r"""The rollouts of a training step, as they are sampled, graded and made ready to train on.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from grail_lightning.answers import Verdict
from grail_lightning.tasks.base import Prompt


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
class SampledBatch:
    """Responses as an engine returns them; rows of one group are neighbours. The module's docstring shows a row.

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
        sampling_logprobs: ``[B, T]`` as the engine reports them: at `Sampling.logprob_temperature`, before top-p/top-k;
            None if it reports none.
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
    sampling_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def prompt_width(self) -> int:
        """P: the columns of `input_ids` before the first response column."""
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

    def fields(self) -> dict[str, Any]:
        """The values by name, as the next stage of the batch takes them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def select(self, rows: Tensor) -> Self:
        """The given rows (``[n]`` long), trimmed to their own longest prompt and response."""
        width, kept = self.prompt_width, rows.tolist()
        taken = rows.to(self.input_ids.device)
        prompt = int(self.prompt_lengths[taken].max()) if kept else 0
        response = int(self.response_lengths[taken].max()) if kept else 0
        columns = slice(width - prompt, width + response)

        def cut(name: str, value: Tensor) -> Tensor:
            if value.ndim == 1:
                return value[taken]
            found = value[taken, columns if name in WHOLE_ROWS else slice(0, response)]
            return found.long() if name in ("input_ids", "response_ids") else found

        changed = {name: map_tensors(name, value, cut) for name, value in self.fields().items()}
        lists = {name: [value[k] for k in kept] for name, value in changed.items() if isinstance(value, list)}
        return dataclasses.replace(self, **changed | lists)

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""
        moved = {name: map_tensors(name, value, lambda _, t: t.to(device)) for name, value in self.fields().items()}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedBatch(SampledBatch):
    """Responses with their rewards, and where their answers stand.

    Attributes:
        answer: Where the answers stand.
        rewards: ``[B]`` float32.
        correct: ``[B]`` bool.
        verdicts: One per row.
        reward_values: ``[B]`` float32 by name, the parts of the rewards before weighting; NaN is no opinion.
    """

    answer: AnswerMasks
    rewards: Tensor
    correct: Tensor
    verdicts: list[Verdict]
    reward_values: dict[str, Tensor] = field(default_factory=dict)

    def with_advantages(self, advantages: Tensor) -> RolloutBatch:
        """The batch as credit methods and the update take it; advantages are ``[B]`` float32."""
        return RolloutBatch(**self.fields(), advantages=advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch(GradedBatch):
    """Rollouts that are ready to train on.

    Attributes:
        advantages: ``[B]`` float32, of each rollout.
    """

    advantages: Tensor


WHOLE_ROWS = ("input_ids", "attention_mask")
"""The fields that hold prompt and response side by side."""


def map_tensors(name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """What `change` makes of each tensor in a field of a batch; other values stay as they are."""
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
