"""The model of another trainer as a policy, and its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from grail_lightning.core.credit.service import FrozenReference
from grail_lightning.core.policy.capabilities import check_padding
from grail_lightning.core.policy.load import check_head, check_vision
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading
from grail_lightning.core.policy.vision import PictureTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class _BorrowedPolicy(Policy):
    """A policy around a model that another trainer trains. The model's configs and switches stay as they are."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        loading: Loading,
        pictures: PictureTokens | None,
        without_adapters: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        super().__init__(model, tokenizer, loading, pictures, samples=False)
        self._without_adapters = without_adapters

    @property
    def has_adapters(self) -> bool:
        """See `Policy`."""
        return self._without_adapters is not None

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """See `Policy`; the adapters are those of the other trainer's `PeftModel`."""
        assert self._without_adapters is not None
        with self._without_adapters():
            yield


def as_policy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    processor: Any = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    reference_adapter: str | None = None,
    runs: bool = True,
) -> Policy:
    """A policy around the model of another trainer, for `run_credit`; make it once.

    The model is neither copied nor changed. That its logits are those of its head, and that padding does not change a
    row, is tried on a few tokens.

    Args:
        model: A causal language model of Transformers, or a `PeftModel` around one; not wrapped for several ranks.
        tokenizer: Its tokenizer, with a pad token.
        processor: The processor of a model that takes pictures. The messages of its prompts hold them.
        chat_template_kwargs: Arguments of the chat template, for methods that change prompts (`RLSD`).
        reference_adapter: The adapter of a `PeftModel` that is the reference; None is the model without adapters.
        runs: Whether a method will run the model (`TokenCredit.runs_policy`). If not, any model will do, and nothing is
            tried.

    Raises:
        ValueError: If the tokenizer has no pad token, or if the architecture is one that `GrailModule` refuses, too.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "`tokenizer` must have a pad token, but got none. Set `tokenizer.pad_token = tokenizer.eos_token`: masks "
            "are given, so that any token can be it."
        )
    adapted = hasattr(model, "get_base_model")
    base: PreTrainedModel = model.get_base_model() if adapted else model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if runs and not hasattr(decoder, "layers"):
        raise ValueError(
            f"`model` must be a causal language model of Transformers with decoder blocks, but got "
            f"{type(model).__name__}. Give the model inside: `model.module` of one that is wrapped for several ranks."
        )
    # What is trained is the other trainer's matter: no part is frozen, and no picture's embedding is kept.
    loading = Loading(chat_template_kwargs=dict(chat_template_kwargs or {}), train_vision=True)
    pictures = PictureTokens(processor, tokenizer) if runs and processor is not None else None
    without = (lambda: _with_adapter(model, reference_adapter)) if adapted else None
    policy = _BorrowedPolicy(base, tokenizer, loading, pictures, without)
    policy.training = base.training  # Of the wrapper alone: the model's modules keep their modes.
    if runs:
        check_head(policy)
        check_padding(policy)
        if pictures is not None:
            check_vision(policy, pictures)
    return policy


@contextmanager
def _with_adapter(model: Any, name: str | None) -> Iterator[None]:
    """A `PeftModel` with another adapter, or without any, inside the context."""
    if name is None:
        with model.disable_adapter():
            yield
        return
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)


class GivenReference(FrozenReference):
    """The reference of another trainer: its frozen model, which stays where it is, or its policy without adapters."""

    @contextmanager
    def running(self, beside: Policy) -> Iterator[Policy]:
        """See `Reference`."""
        if not self.has_adapters:
            yield self.policy
            return
        with self.policy.adapters_off():
            yield self.policy
