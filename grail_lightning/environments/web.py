"""JSON over HTTP: requests to servers whose answers may be anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 8_000_000  # Of an answer: what comes from outside must not fill the memory.


def check_address(option: str, url: str, example: str) -> None:
    """Check that an option is an HTTP address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"`{option}` must be an address such as {example}, but got {url!r}.")


def post(url: str, body: Mapping[str, Any], *, seconds: float, retries: int, key: str | None = None) -> Any:
    """The JSON with which a server answers; nothing is redirected, since the key is for this address alone.

    A request is repeated if the server is silent for these seconds, and at status 429 and 5xx.

    Raises:
        ValueError: If there is no answer that can be read.
    """
    import urllib3  # Not needed without a server.

    again = urllib3.Retry(
        total=retries,
        redirect=0,
        allowed_methods=None,
        status_forcelist=(429, 500, 502, 503, 504),
        backoff_factor=0.2,
        raise_on_status=False,
        respect_retry_after_header=False,
    )
    # Each request has a connection of its own: an idle one may be closed by the server at any moment.
    headers = {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib3.PoolManager(headers=headers, retries=again, timeout=seconds) as pool:
            answer = pool.request("POST", url, json=body, preload_content=False)
            try:
                text = answer.read(MOST_BYTES, decode_content=True)
            finally:
                answer.close()
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"{url} did not answer ({type(reason).__name__}).") from None
    try:
        if answer.status == 200:
            return json.loads(text)
    except (ValueError, RecursionError):  # The second one from too deep nesting.
        pass
    raise ValueError(f"{url} answered with status {answer.status} and {text[:200]!r}, but not with JSON.")
