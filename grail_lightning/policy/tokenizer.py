"""Loading of the tokenizer, and conversion of prompts into token ids."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grail_lightning.picture import in_parts, pictures_in
from grail_lightning.policy.options import LoadedPolicy, PolicySource, read_config, reading
from grail_lightning.tasks.problem import Messages, TokenText

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from grail_lightning.policy.pictures import PictureTokens


def load_tokenizer(name: PolicySource, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy. Its pad token must have an embedding; if it has none, the end token replaces it."""
    from transformers import AutoTokenizer

    if isinstance(name, LoadedPolicy):
        tokenizer = copy.deepcopy(name.tokenizer)
    else:
        with reading(name) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # Transformers makes one without words.
        raise ValueError(
            f"`policy` {name!r} must have a tokenizer, but its files (tokenizer.json, say) are missing. Copy them from "
            "the model that it was made of."
        )
    config = read_config(name, trust_remote_code)
    known = getattr(config.get_text_config(), "vocab_size", None) or len(tokenizer)
    # Masks are made from lengths, so any token can be the pad token. A token that was added to the tokenizer but not to
    # the model has no embedding.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= known:
        ends = tokenizer.eos_token_id is not None and tokenizer.eos_token_id < known
        tokenizer.pad_token = tokenizer.eos_token if ends else tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages | str,
    chat_template_kwargs: dict[str, Any] | None = None,
    pictures: PictureTokens | None = None,
) -> list[int]:
    """The token ids of a prompt. Messages pass through the chat template if there is one; plain text is unchanged.

    The ids of a `TokenText` are its own. With `pictures` (of a policy that takes some) every content is a list of
    parts for the template, and the tokens of a picture have the id of its place.
    """
    if pictures is None and (shown := pictures_in(messages)):
        raise ValueError(f"{shown[0].place}: a prompt has a picture, but the policy takes text alone. Set another one.")
    more = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
    if isinstance(messages, TokenText):
        ids: Sequence[int] = messages.ids
    elif isinstance(messages, str):
        ids = tokenizer(messages)["input_ids"]
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
        ids = tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
    if not ids:
        raise ValueError(
            f"A prompt must encode to at least one token, but got none from {messages!r}. Give its row a `problem`, or "
            "the task an `instruction`."
        )
    return list(ids)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> tuple[int, ...]:
    """The end tokens of tokenizer and generation config together: many chat models name theirs in only one of them."""
    ids = generation_config.eos_token_id
    named = [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]
    return tuple(sorted({*named, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}))
