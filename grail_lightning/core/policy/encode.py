"""Prompts as token ids: through the chat template, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grail_lightning.core.records.picture import Messages, PictureEncoder, in_parts, pictures_in
from grail_lightning.core.records.task import TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages | str,
    chat_template_kwargs: dict[str, Any] | None = None,
    pictures: PictureEncoder | None = None,
) -> list[int]:
    """The token ids of a prompt. Messages pass through the chat template if there is one; plain text see `begun_ids`.

    The ids of a `TokenText` are its own. With `pictures` (of a policy that takes some) every content is a list of
    parts for the template, and the tokens of a picture have the id of its place.
    """
    if pictures is None and (prompt_pictures := pictures_in(messages)):
        raise ValueError(
            f"{prompt_pictures[0].place}: a prompt has a picture, but the policy takes text alone. Set another one."
        )
    more = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
    if isinstance(messages, TokenText):
        ids: Sequence[int] = messages.ids
    elif isinstance(messages, str):
        ids = begun_ids(tokenizer, messages)
    elif pictures is not None:
        template = tokenizer.chat_template or pictures.processor.chat_template
        if template is None:
            raise ValueError("`policy` takes pictures, but has no chat template, which says where they stand. Add one.")
        text = tokenizer.apply_chat_template(in_parts(messages), chat_template=template, **more)
        ids = pictures.expand(text, pictures_in(messages))
    elif tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, **more)
        # The template already contains the special tokens.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = begun_ids(tokenizer, "\n".join(message["content"] for message in messages))
    if not ids:
        raise ValueError(
            f"A prompt must encode to at least one token, but got none from {messages!r}. Give its row a `problem`, or "
            "the task an `instruction`."
        )
    return list(ids)


def begun_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a text as a prompt: what the tokenizer adds stands before it, and nothing behind it.

    Text that begins with the BOS token is what a chat template has rendered, which contains its special tokens already.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids[:1] == [tokenizer.bos_token_id] or not tokenizer.num_special_tokens_to_add():
        return ids
    whole: list[int] = tokenizer(text)["input_ids"]
    # A tokenizer with `add_eos_token` would end the prompt, and the policy would go on behind its end.
    ends = (start + len(ids) for start in range(len(whole) - len(ids), -1, -1) if whole[start:][: len(ids)] == ids)
    return whole[: next(ends, None)]
