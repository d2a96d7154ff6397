"""The Hugging Face hub, or its cache on this machine alone where the hub does not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_PATIENCE = 4.0  # Seconds; `HF_HUB_ETAG_TIMEOUT` replaces it.


def unreachable() -> str:
    """The reason why the hub cannot be asked; empty if it answers, whatever it says.

    huggingface_hub tries each request six times when there is no network, which takes half a minute for each file.
    """
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else _ask(constants.ENDPOINT)


@cache
def _ask(endpoint: str) -> str:
    """The reason why an address does not answer; empty if it does."""
    from huggingface_hub import constants, get_session

    own = constants.HF_HUB_ETAG_TIMEOUT
    try:
        get_session().head(endpoint, timeout=_PATIENCE if own == constants.DEFAULT_ETAG_TIMEOUT else float(own))
    except Exception as error:  # The network, its proxies and their certificates raise many types.
        return str(error) or type(error).__name__
    return ""


@contextmanager
def hub_or_cache() -> Iterator[str]:
    """What is loaded inside comes from the hub, or from its cache alone; yields why the hub cannot be reached, or ""."""
    from huggingface_hub import constants

    reason = unreachable()
    # `datasets` has a copy of its own, which it makes when it is imported.
    modules: list[Any] = [constants, sys.modules.get("datasets.config")]
    before = [(module, module.HF_HUB_OFFLINE) for module in modules if module is not None]
    for module, offline in before:
        module.HF_HUB_OFFLINE = bool(reason) or offline
    try:
        yield reason
    finally:
        for module, offline in before:
            module.HF_HUB_OFFLINE = offline
