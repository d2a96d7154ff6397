"""What a tokenizer's chat template writes around turns and results, found by rendering conversations that try it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

from grail_lightning.picture import in_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd0"  # Not a character by Unicode's definition, so no text has a use for it.
_QUESTION = {"role": "user", "content": "Question"}
_THOUGHT = "<think>\nReason\n</think>\n\nText."
_TURN_START = re.compile(r"(<think>\s*(</think>\s*)?)?")


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with the declarations of tools."""

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]  # Its arguments, `tools` among them.
    tool: str  # The name of a tool.
    control: Iterable[str]  # The texts of the control tokens.
    in_parts: bool = False  # Whether it takes contents as lists of parts: it is of a policy that takes pictures.

    def render(self, messages: Sequence[dict[str, Any]], *, ask: bool = True, **kwargs: Any) -> str:
        """The text of a conversation, with the beginning of the next turn if `ask`."""
        options = {**self.kwargs, **kwargs, "tokenize": False, "add_generation_prompt": ask}
        messages = in_parts(list(messages)) if self.in_parts else list(messages)
        try:
            return cast(str, self.tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # A template is a program of its own and can raise anything.
            raise ValueError(refusal(f"it cannot show a call and its result ({str(error)[:200]})")) from error

    def trial(self, content: str = "") -> list[dict[str, Any]]:
        """A question, and a turn that calls the tool."""
        function = {"name": self.tool, "arguments": {"query": "one"}}
        call = {"type": "function", "function": function}
        return [_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}]

    @cached_property
    def end(self) -> str:
        """The text of the end token: the first control token behind what the assistant said."""
        text = self.render([_QUESTION, {"role": "assistant", "content": MARK}], ask=False)
        behind = text.rpartition(MARK)[2]
        ends = [(behind.find(token), token) for token in self.control if token in behind]
        if MARK not in text or not ends:
            raise ValueError(refusal("it ends the assistant's turn with no special token"))
        return min(ends)[1]

    def until_end(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of a conversation up to the end token of its last turn."""
        return "".join(self.render(messages, ask=False).rpartition(self.end)[:2])

    @cached_property
    def _before_results(self) -> str:
        return self.until_end(self.trial())

    def around(self, results: Sequence[Sequence[str | None]]) -> list[str]:
        """What follows the end token: parts of the template and texts by turns, the template first and last.

        Each of the `results` has one text, or texts and pictures (None), whose places are in the template's parts.
        """
        answers = [{"role": "tool", "name": self.tool, "content": _marked(result)} for result in results]
        text, number = self.render([*self.trial(), *answers]), sum(part is not None for r in results for part in r)
        parts = text.removeprefix(self._before_results).split(MARK)
        if not text.startswith(self._before_results) or len(parts) != 2 * number + 1:
            raise ValueError(refusal("a result changes how the turn before it is shown, or is not shown itself"))
        return parts

    def check(self) -> None:
        """Check that a turn is shown alike whatever follows it, so that ids can only be appended."""
        between = "".join(self.around([["Result"]]))
        for content in ("", _THOUGHT):
            turn = [self.trial(content)[1], {"role": "tool", "name": self.tool, "content": "Result"}]
            prompt = self.render([_QUESTION])
            step = self.until_end([_QUESTION, turn[0]]).removeprefix(prompt) + between
            if any(prompt + step * k != self.render([_QUESTION, *turn * k]) for k in (1, 2, 3)):
                raise ValueError(refusal("an earlier turn is shown in another way once others follow it"))

    def for_training(self) -> ChatTemplate:
        """Our template in its place if both give the same prompts, as where its own is of Qwen3's kind; else itself."""
        text = resources.files(__package__).joinpath("templates", "qwen3.jinja").read_text("utf-8")
        ours = replace(self, kwargs={**self.kwargs, "chat_template": text})
        system, said = {"role": "system", "content": "Rules"}, {"role": "assistant", "content": _THOUGHT}
        trials = [[_QUESTION], [system, _QUESTION], [_QUESTION, said, _QUESTION]]
        prompts = [(self.render(messages), ours.render(messages)) for messages in trials]
        starts = {own.removeprefix(common) for own, common in prompts}
        start = starts.pop()  # What its own template writes behind the header of the next turn.
        if starts or not _TURN_START.fullmatch(start):
            return self
        return replace(ours, kwargs={**ours.kwargs, "turn_start": start})


def _marked(result: Sequence[str | None]) -> Any:
    """The content of a result whose texts stand between two `MARK`; a plain text, or parts."""
    texts = [None if part is None else f"{MARK}{part}{MARK}" for part in result]
    parts = [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
    return texts[0] if len(texts) == 1 and texts[0] is not None else parts


def refusal(reason: str) -> str:
    """The message about a template that cannot be used."""
    return (
        f"The tokenizer's chat template cannot be used for rollouts of several turns: {reason}. Give the tokenizer a "
        "template for training, or choose calls in plain `tags`."
    )
