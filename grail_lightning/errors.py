"""What the user got wrong, said in one line."""

from __future__ import annotations

import inspect
import re
import traceback
from pathlib import Path

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException

PACKAGE = str(Path(__file__).parent)
CONFIG_LIBRARIES = ("jsonargparse", "lightning/pytorch/cli", "configuration_validator", "accelerator_connector")
MISMATCH = "Error(s) in loading state_dict"
EXTRAS = {"torchao": "torchao", "peft": "lora", "vllm": "vllm", "flash_attn": "flash"}
DEBUG_HINT = "(GRAIL_DEBUG=1 shows the traceback)"


def explain(error: BaseException) -> bool:
    """Whether an error is the user's to mend: of this package's own checks, of options, of another policy's checkpoint.

    A `ValueError` from deep inside another library is not: it keeps its traceback.
    """
    if isinstance(error, (ArgumentError, MisconfigurationException)):
        return True
    if isinstance(error, RuntimeError):
        return str(error).startswith(MISMATCH)
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = frames[-1].filename if frames else ""
    return raised_in.startswith(PACKAGE) or any(name in raised_in for name in CONFIG_LIBRARIES)


def one_line(error: BaseException) -> str:
    """The message on one line, with the known names where a class name was not one of them."""
    text = str(error)
    option = match.group(1) if (match := re.search(r'Parser key "([\w.]+)"', text)) else ""
    unknown = re.search(r"Expected a dot import path string: (\S+)", text)
    if text.startswith(MISMATCH):
        differing = re.findall(r'"([\w.]+)"|size mismatch for ([\w.]+)', text)
        said = (
            f"`ckpt_path` must be a checkpoint of this policy, but {len(differing)} of its weights have other names or "
            f"shapes, such as {''.join(differing[0])}. Give the `model.policy` and `model.loading.lora` that it was "
            "trained with; they stand in the config.yaml of its run."
        )
    elif option and (missing := re.search(r"No module named '(\w+)", text)):
        said = f"`{option}` needs {(module := missing.group(1))}, which is not installed. " + (
            f"Run: pip install 'grail-lightning[{EXTRAS[module]}]'." if module in EXTRAS else "Is it spelled right?"
        )
    elif unknown and option in _choices():
        known = ", ".join(sorted(_names(_choices()[option])))
        said = f"`{option}` must be one of {known}, or the import path of a class, but got {unknown.group(1)!r}."
    else:
        said = " ".join(_reasons(text)) or re.sub(r"\s+", " ", text).strip()
        said = f"`{option}`: {said}" if option and option not in said else said
    return f"{said} {DEBUG_HINT}"


def _reasons(text: str) -> list[str]:
    """What jsonargparse lists under "Errors:" for a value that fits none of several types, without the noise."""
    listed = re.findall(r"^\s*- (.+(?:\n(?!\s*- |\s*Given value).+)*)", text.partition("Errors:")[2], re.MULTILINE)
    told = [re.sub(r"\s+", " ", reason) for reason in listed]
    return [reason for reason in told if not reason.startswith("Expected a <class 'NoneType'>")]


def _choices() -> dict[str, type]:
    from lightning.pytorch import LightningDataModule

    from grail_lightning.credit import CreditControl, TokenCredit
    from grail_lightning.engines import RolloutEngine

    return {
        "model.credit": TokenCredit,
        "model.control": CreditControl,
        "model.engine": RolloutEngine,
        "data": LightningDataModule,
    }


def _names(base: type) -> set[str]:
    """Names of this package's subclasses of `base`, at any depth."""
    found: set[str] = set()
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        found |= _names(subclass)
        if subclass.__module__.startswith("grail_lightning") and not inspect.isabstract(subclass):
            found.add(subclass.__name__)
    return found
