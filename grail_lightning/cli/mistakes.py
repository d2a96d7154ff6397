"""What a user got wrong, in one line: the leaf of jsonargparse's message, with the names that are accepted."""

from __future__ import annotations

import errno
import importlib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

from grail_lightning.callbacks.choices import choices
from grail_lightning.cli.config_files import file_that_sets
from grail_lightning.cli.help import DEBUG_HINT, SUBCOMMANDS
from grail_lightning.policy.load import other_policy
from grail_lightning.tasks.import_path import did_you_mean

PACKAGE = str(Path(__file__).parents[1])
CONFIG_LIBRARIES = (
    "jsonargparse",
    "lightning/pytorch/cli",
    "configuration_validator",
    "lightning/pytorch/loops/fit_loop",
    "accelerator_connector",
    "lightning/fabric/accelerators",
    "lightning/fabric/utilities/device_parser",
    "lightning/fabric/utilities/seed",
    "lightning/fabric/plugins/environments",
    "lightning/pytorch/loops/fit_loop",
)
MISMATCH = "Error(s) in loading state_dict"
NOT_LOGGED = "Early stopping conditioned on metric"  # One that only the run could show to be missing.
EXTRAS = {"torchao": "torchao", "peft": "lora", "vllm": "vllm", "flash_attn": "flash"}
# Errors of the operating system that the user can correct, wherever they are raised.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
# Lines of jsonargparse that give no reason: headings, and what would be accepted in place of the path of a file.
ASIDE = (
    *("Subtypes:", "Errors:", "Given value type:", "Does not validate", "Expected a path but", "Not a valid subclass"),
    *("Subclass types expect", "a class path (str)", "a dict with"),
)
TYPE, KEY, CLASS, VALUE = "Expected a ", 'Parser key "', "Problem with given class_path '", "Given value: "


def explain(error: BaseException) -> bool:
    """Whether the user can correct an error: one of our own checks, a wrong option, or what a disk refuses.

    A `ValueError` that another library raises is not of this kind and keeps its traceback.
    """
    if isinstance(error, (ArgumentError, MisconfigurationException)) or str(error).startswith((MISMATCH, NOT_LOGGED)):
        return True
    if isinstance(error, OSError) and error.errno in FULL | REFUSED:
        # An error while a file is written does not name it. Other errors without a file are not about files.
        return error.filename is not None or error.errno in FULL
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = frames[-1].filename if frames else ""
    ours = raised_in.startswith(PACKAGE) and not isinstance(error, RuntimeError)
    return ours or any(name in raised_in for name in CONFIG_LIBRARIES)


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    if isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        remedy = " Free some space, or choose a folder on another disk." if error.errno in FULL else ""
        return f"{error.strerror or error}{where}.{remedy} {DEBUG_HINT}"
    text = str(error)
    if text.startswith(MISMATCH):
        differing = [part.partition(":")[0] for part in text.split("size mismatch for ")[1:]]
        text = other_policy([*differing, *text.split('"')[1::2]])
    elif text.startswith("Does not validate"):
        # A class that refuses its arguments when it is made: the reason stands among the types of its option.
        text = next((leaf.reason for leaf in leaves(text) if not leaf.reason.startswith(TYPE)), text)
    return f"{' '.join(text.split())} {DEBUG_HINT}"


@dataclass
class Leaf:
    """A leaf of jsonargparse's message, a tree with one branch for each type that an option could have.

    Attributes:
        option: The dotted name of the option.
        owner: The import path of the class that has the option; empty for options of the command line.
        reason: What is wrong.
        value: What was given, as far as the message says so.
    """

    option: str
    owner: str
    reason: str
    value: str = ""


def leaves(message: str) -> list[Leaf]:
    """The leaves of a message, in its order; the indentation of a line says to which option it belongs."""
    reasons: list[Leaf] = []
    above: list[tuple[int, str, str]] = []  # Indentation, name and class of the options around a line.
    for line in filter(str.strip, message.splitlines()):
        content = line.strip().removeprefix("- ")
        indent = line.find(content)
        above = [node for node in above if node[0] < indent]
        while (parts := content.partition(KEY))[1]:
            name, _, content = parts[2].partition('":')
            above.append((indent, name, ""))
        if content.startswith(CLASS):
            above.append((indent, "", content.removeprefix(CLASS).rstrip("':")))
            continue
        option = ".".join(name for _, name, _ in above if name)
        if content.startswith(VALUE):
            value = content.removeprefix(VALUE).partition(". Got value: ")[0]
            for leaf in reasons:
                leaf.value = leaf.value or value * (leaf.option == option)
        elif content.strip() and not content.strip().startswith(ASIDE):
            reason, _, value = content.strip().partition(". Got value: ")
            made_of = value.partition("(class_path='")[2].partition("'")[0]  # A class that is called later.
            owner = next((owner for _, _, owner in reversed(above) if owner), made_of)
            reason = reason.rpartition("expects a function or a callable class: ")[2]
            if reason.endswith("is not accepted"):
                option, reason = f"{option}.{reason.split(chr(39))[1]}", "is not accepted"
            value = value.partition(". Got value: ")[0]
            value = value or reason.partition("import path string: ")[2]
            reasons.append(Leaf(option, owner, reason, made_of if value.startswith("Namespace(") else value))
    return reasons


def option_error(error: ArgumentError, known: Iterable[str], arguments: Sequence[str]) -> str:
    """One sentence about a wrong option, with the names that are accepted and the config file that sets it.

    Args:
        error: The error of the parser.
        known: The names of all options of the command line.
        arguments: The arguments of the command line.
    """
    message = str(error)
    _, unrecognised, stray = message.partition("unrecognized arguments: ")
    _, in_file, stray_in_file = message.partition(" does not accept option '")
    if unrecognised and not stray.startswith("--"):
        return f"An option must begin with two dashes, as `--model.policy=…` does, but got {stray.split()[0]!r}."
    if unrecognised or in_file:
        option = (stray or stray_in_file).split()[0].partition("=")[0].lstrip("-").rstrip("'")
        said = _unknown(option, "", list(known))
    elif KEY in message:
        reasons = leaves(message)
        deepest = max((leaf for leaf in reasons if leaf.option), key=lambda leaf: leaf.option.count("."))
        option = deepest.option
        said = _wrong([leaf for leaf in reasons if (leaf.option, leaf.owner) == (option, deepest.owner)])
    else:
        option, said = "", " ".join(message.split())
        if required := said.partition("arguments are required: ")[2]:
            names = [
                f"`{name.partition('.')[2] if name.startswith(SUBCOMMANDS) else name}`" for name in required.split(", ")
            ]
            said = (
                f"{', '.join(names)} must be given, on the command line or in a file such as configs/quickstart.yaml."
            )
    file = file_that_sets(arguments, option) if option else None
    return said if file is None else f"{said} It is set in {file}."


def _wrong(reasons: list[Leaf]) -> str:
    """The sentence about a value that an option does not accept."""
    option, owner = reasons[0].option, reasons[0].owner
    if reasons[0].reason == "is not accepted":
        return _unknown(option, owner, [f"{option.rpartition('.')[0]}.{name}" for name in _options_of(owner)])
    value = next((leaf.value for leaf in reasons if leaf.value), "")
    got = f", but got {value!r}" if value and not value.startswith("NestedArg(") else ""
    types = [leaf.reason.removeprefix(TYPE) for leaf in reasons if leaf.reason.startswith(TYPE)]
    reason = next((leaf.reason.rstrip(".") for leaf in reasons if not leaf.reason.startswith(TYPE)), "")
    module = reason.partition("No module named '")[2].partition("'")[0]
    if module:
        remedy = (
            f"Run: pip install 'grail-lightning[{EXTRAS[module]}]'." if module in EXTRAS else "Is it spelled right?"
        )
        return f"`{option}` needs {module}, which is not installed. {remedy}"
    if "are required: " in reason:
        return f"`{option}` must be given {reason.partition('are required: ')[2]}."
    if names := choices(option):
        said = f"`{option}` must be one of {', '.join(names)}, or the import path of a class{got}"
        return f"{said}{_what_it_is(value, reason, names)}"
    if reason:
        return f"`{option}` must have another value{got}: {reason}."
    named = [kind if ":" not in kind else "the import path of a class" for kind in dict.fromkeys(types)]
    for form, plain in (
        ("<class 'NoneType'>", "null"),
        ("<class '", ""),
        ("'>", ""),
        ("typing.Literal[", "one of "),
        ("]", ""),
        ("'", ""),
    ):
        named = [kind.replace(form, plain) for kind in named]
    return f"`{option}` must be {' or '.join(named)}{got}."


def _what_it_is(given: str, reason: str, names: list[str]) -> str:
    """The end of a sentence about a class that an option does not accept."""
    module, _, name = given.rpartition(".")
    if base := reason.partition("subclass of ")[2].removeprefix("<class '").strip("'>. "):
        what = _imported(given)
        is_class = isinstance(what, type)
        return f", which is a {f'class that does not derive from `{base}`' if is_class else type(what).__name__}."
    if "is abstract" in reason or "Multiple subclasses" in reason:
        return f": {reason}."
    there = vars(importlib.import_module(module)) if "has no attribute" in reason else {}
    return f".{did_you_mean(name, names) or did_you_mean(name, there)}"


def _unknown(option: str, owner: str, known: list[str]) -> str:
    """The sentence about an option that does not exist."""
    group, _, name = option.rpartition(".")
    if name == "class_path":
        return f"The options of a class must stand under `init_args`, beside `class_path`, but `{group}` has others."
    siblings = [other for other in known if other.rpartition(".")[0] == group] if group else known
    elsewhere = [f"`{other}`" for other in known if group and other.endswith(f".{name}")]
    hint = did_you_mean(f"`{option}`", elsewhere or [f"`{other}`" for other in siblings or known])
    if not hint and group and siblings:
        has = ", ".join(other.rpartition(".")[2] for other in siblings)
        hint = f" {owner.rpartition('.')[2] or f'`{group}`'} has: {has}."
    return f"There is no option `{option}`.{hint or ' `grail-lightning fit --help all` lists them.'}"


def _options_of(owner: str) -> list[str]:
    """The dotted names of the options of a class."""
    parser = ArgumentParser()
    parser.add_class_arguments(_imported(owner), fail_untyped=False)
    return list(parser.get_defaults().keys())


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
