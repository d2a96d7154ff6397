"""Prompts that are too long, for the model or for the option `max_prompt_length`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning.pytorch.utilities import rank_zero_warn

from grail_lightning.data.loaders import PromptSet
from grail_lightning.data.rows import RowPrompts
from grail_lightning.tasks.problem import Messages, Prompt

Encode = Callable[[Messages | str], Sequence[int]]

_AT_BORDERS = 4  # A text may be cut into a few tokens more or less where it meets its neighbours.
_MOST_NAMED = 5


@dataclass(frozen=True)
class PromptLimit:
    """The largest length of a prompt: `max_prompt_length`, or what the longest response leaves of the context."""

    given: int | None  # The option `max_prompt_length`.
    context: int | None  # The room for prompt and response together in tokens; None if that is not known.
    response: int = 0  # The largest length of a response,
    option: str = "sampling.max_response_length"  # and the option that sets it.

    @property
    def tokens(self) -> int | None:
        """The limit in tokens; None if there is none."""
        room = None if self.context is None else max(self.context - self.response, 0)
        return min((n for n in (self.given, room) if n is not None), default=None)

    def exceeded(self, prompts: Sequence[Prompt], name: str, lengths: Mapping[int, int]) -> str:
        """Which prompts of a dataset are too long, by file and line where they have one, and for which options.

        `lengths` are those of the long prompts, by their numbers.
        """
        named = []
        for number, length in list(lengths.items())[:_MOST_NAMED]:
            place = f"prompt {number + 1}"
            if isinstance(prompts, RowPrompts):
                name = prompts.table.source
                place = prompts.table.place(prompts.indices[number]).removeprefix(f"{name}, ")
            named.append(f"{place} ({length:,} tokens)")
        more = [f"and {len(lengths) - _MOST_NAMED:,} more"] if len(lengths) > _MOST_NAMED else []
        return (
            f"{len(lengths):,} of {len(prompts):,} prompts of {name} are longer than {self.tokens:,} tokens, the "
            f"smaller of `data.max_prompt_length` {self.given} and the context {self.context} less `{self.option}` "
            f"{self.response}: {', '.join([*named, *more])}. The longest has {max(lengths.values()):,} tokens."
        )


def long_prompts(prompts: Sequence[Prompt], encode: Encode, most: int) -> dict[int, int]:
    """The lengths of the prompts of more than `most` tokens, by their numbers from 0.

    A token stands for at least one byte, so that a prompt of few bytes need not be tokenised.
    """
    around: dict[tuple[str, ...], int] = {}  # The tokens of the chat template, by the roles of a conversation.
    lengths = {}
    for number, prompt in enumerate(prompts):
        messages = prompt.messages
        turns = [{"role": "", "content": messages}] if isinstance(messages, str) else messages
        if all(isinstance(turn["content"], str) for turn in turns):  # Without pictures.
            roles = tuple(turn["role"] for turn in turns)
            if roles not in around:
                blank = "." if isinstance(messages, str) else [turn | {"content": "."} for turn in turns]
                around[roles] = len(encode(blank))
            if around[roles] + sum(len(turn["content"].encode()) + _AT_BORDERS for turn in turns) <= most:
                continue
        if (length := len(encode(messages))) > most:
            lengths[number] = length
    return lengths


def leave_out_long(
    prompts: PromptSet, encode: Encode, limit: PromptLimit, overlong: Literal["drop", "error"]
) -> PromptSet:
    """The training prompts that are not too long; a warning names the others, or an error if `overlong` says so."""
    every = prompts.prompts
    lengths = {} if limit.tokens is None else long_prompts(every, encode, limit.tokens)
    if not lengths:
        return prompts
    said = limit.exceeded(every, prompts.name, lengths)
    if overlong == "error":
        raise ValueError(f"{said} Raise the limit, or set `data.overlong: drop`.")
    if len(lengths) == len(every):
        raise ValueError(f"{said} None is left.")
    rank_zero_warn(f"{said} Training leaves out longer prompts.")
    short = [number for number in range(len(every)) if number not in lengths]
    difficulty = [prompts.difficulty[number] for number in short] if prompts.difficulty else ()
    if isinstance(every, RowPrompts):
        return replace(prompts, prompts=every.take([every.indices[number] for number in short]), difficulty=difficulty)
    return replace(prompts, prompts=[every[number] for number in short], difficulty=difficulty)


def check_evaluated(prompts: Sequence[Prompt], encode: Encode, limit: PromptLimit) -> None:
    """Check that all prompts of an evaluation can be answered; an accuracy without some would be of other problems."""
    lengths = {} if limit.tokens is None else long_prompts(prompts, encode, limit.tokens)
    if lengths:
        said = limit.exceeded(prompts, prompts[0].dataset, lengths)
        raise ValueError(f"{said} An evaluation leaves no problem out: raise the limit, or remove such rows.")
