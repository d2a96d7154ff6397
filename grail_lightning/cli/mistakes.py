"""What a user got wrong, in one line: the leaves of jsonargparse's message, with the names that are accepted."""

from __future__ import annotations

import errno
import inspect
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException

from grail_lightning.cli.classes import choices, find_class, options_parser
from grail_lightning.cli.config_files import plain_name
from grail_lightning.cli.help import refuse
from grail_lightning.cli.known_as import known_algorithm, known_as
from grail_lightning.guard import of_a_signal, silent_end, users_place
from grail_lightning.policy.load import other_policy
from grail_lightning.tasks.import_path import did_you_mean, import_function

_PACKAGE = str(Path(__file__).parents[1])
_INTERRUPTED = 130  # The exit code of a process that Ctrl-C has ended.
# Where Lightning and jsonargparse check options; errors from elsewhere in them keep their traceback.
_CONFIG_LIBRARIES = (
    *("jsonargparse", "lightning/pytorch/cli", "lightning/pytorch/loops/fit_loop"),
    *("configuration_validator", "accelerator_connector", "lightning/fabric/accelerators"),
    *("lightning/fabric/utilities/device_parser", "lightning/fabric/utilities/seed"),
    *("lightning/fabric/plugins/environments", "lightning/pytorch/trainer/trainer", "callback_connector"),
)
_MISMATCH = "Error(s) in loading state_dict"
_NOT_LOGGED = "Early stopping conditioned on metric"  # One that only the run could show to be missing.
# Errors of the operating system that the user can correct, wherever they are raised.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
# How jsonargparse's lines begin, among them those that give no reason.
_KEY, _TYPE, _GIVEN = 'Parser key "', "Expected a ", "Given value: "
_REQUIRED = "the following arguments are required: "
# The name of an option that does not exist, perhaps behind that of its group.
_STRAY = re.compile(
    r"unrecognized arguments: --([^\s=]+)"
    r"|Option '([^']+)' is not accepted"
    r"|(?:Group '([^']+)' )?does not accept option '([^']+)'"
)
_TYPES = {"dot import path string": "the import path of a class", "NoneType": "null", "tuple": "a list in brackets"}
_ASIDE = (
    *("Subtypes:", "Errors:", "Given value", "Does not validate", "Expected a path but", "Problem with given"),
    *("Not a valid subclass", "Subclass types expect", "a class path", "a dict with"),
)


_UNDER_INIT_ARGS = "The options of a class in `{}` must stand under `init_args`, beside `class_path`."


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """A context that reports a user's mistake in one line with exit code 2, and ends with 130 after Ctrl-C."""
    try:
        yield
    except (ArgumentError, ValueError, TypeError, OSError, RuntimeError, MisconfigurationException) as error:
        if not _is_users(error):
            raise
        if os.environ.get("GRAIL_DEBUG"):
            traceback.print_exc()
        refuse(f"{_message(error)} (GRAIL_DEBUG=1 shows the traceback)")
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's code after Ctrl-C is 1.
            raise SystemExit(_INTERRUPTED) from None
        if not of_a_signal(end) and users_place(end):  # Of a module that is imported, or of a class that is made.
            refuse(silent_end(end, "Code that options name"))
        raise


def _is_users(error: BaseException) -> bool:
    """Whether the user can correct an error: one of our own checks, a wrong option, or what a disk refuses.

    A `ValueError` that another library raises is not of this kind and keeps its traceback.
    """
    if isinstance(error, (ArgumentError, MisconfigurationException)) or str(error).startswith((_MISMATCH, _NOT_LOGGED)):
        return True
    if isinstance(error, OSError) and error.errno in _FULL | _REFUSED:
        # An error while a file is written does not name it. Other errors without a file are not about files.
        return error.filename is not None or error.errno in _FULL
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = frames[-1].filename if frames else ""
    ours = raised_in.startswith(_PACKAGE) and not isinstance(error, RuntimeError)
    return ours or any(name in raised_in for name in _CONFIG_LIBRARIES)


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        remedy = " Free some space, or choose a folder on another disk." if error.errno in _FULL else ""
        return f"{error.strerror or text}{where}.{remedy}"
    if text.startswith(_MISMATCH):
        differing = [part.partition(":")[0] for part in text.split("size mismatch for ")[1:]]
        return other_policy([*differing, *text.split('"')[1::2]])
    if text.startswith("Does not validate"):  # A class refused its arguments when it was made.
        reasons = _reasons(text.splitlines())
        return "; ".join([reason for reason in reasons if not reason.startswith(_TYPE)] or reasons)
    return text


def option_error(error: ArgumentError, known: Sequence[str], of_files: Mapping[str, Any]) -> str:
    """The sentence about a wrong option, with the names that are accepted.

    `known` are all names of the command line, and `of_files` the options of config files.
    """
    if place := next(_beside_init_args(of_files), ""):
        return _UNDER_INIT_ARGS.format(place)
    message = str(error)
    option, lines = _deepest(message)
    for line in lines:
        if found := _STRAY.search(line):
            stray = ".".join(filter(None, found.groups()))
            if stray == "class_path":
                return _UNDER_INIT_ARGS.format(option)
            if option:
                owner = _owner(message, line)
                return _no_option_of(import_function(owner, {}, "A class", owner), option, stray)
            return _no_option(stray, known)
        if line.startswith(_REQUIRED) and option:
            return f"`{option}` must be given with all arguments: {line}."
    if missing := message.partition(_REQUIRED)[2] if not option else "":
        needed = ", ".join(f"`{name.partition('.')[2]}`" for name in missing.split(", "))  # Behind the subcommand.
        return f"{needed} must be given, on the command line or in a file such as configs/quickstart.yaml."
    if not option:
        return message
    given = [line.removeprefix(_GIVEN) for line in lines if line.startswith(_GIVEN)]
    value = next((text for text in given if "NestedArg(" not in text and "Namespace(" not in text), "")
    names, reasons = choices(option), _reasons(lines)
    types = [_type(reason.removeprefix(_TYPE)) for reason in reasons if reason.startswith(_TYPE)]
    accepted = f"one of {', '.join(names)}, or the import path of a class" if names else " or ".join(types)
    others = [reason for reason in reasons if not reason.startswith(_TYPE)]
    name = value.rpartition(".")[2]
    why = f": {'; '.join(others)}." if others else "." + (known_algorithm(option, name) or did_you_mean(name, names))
    return f"`{option}` must be {accepted or 'another value'}{value and f', but got {value!r}'}{why}"


def _beside_init_args(options: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """The options whose value is a class with options of its own outside of its `init_args`."""
    for name, value in options.items():
        if isinstance(value, dict):
            option = plain_name(f"{group}.{name}".removeprefix("."))
            if "class_path" in value and not value.keys() <= {"class_path", "init_args", "dict_kwargs"}:
                yield option
            yield from _beside_init_args(value, option)


def _type(name: str) -> str:
    """What a type is called in a message."""
    name = name.removeprefix("<class '").partition("'>")[0]
    kind, _, values = name.removeprefix("typing.").partition("[")
    return f"one of {values.removesuffix(']')}" if kind == "Literal" else _TYPES.get(name, name)


def _deepest(message: str) -> tuple[str, list[str]]:
    """The innermost option that a message is about, and the lines about it.

    The message is a tree with one branch for each type that an option could have. The indentation of a line says to
    which option it belongs. A value that stands at the end of a line gets one of its own.
    """
    above: list[tuple[int, str]] = []
    lines: dict[str, list[str]] = {}
    message = re.sub(r"\. Got value: |(?<=import path string): ", f"\n{' ' * len(message)}{_GIVEN}", message)
    for line in filter(str.strip, message.splitlines()):
        text = line.lstrip(" -")
        indent = len(line) - len(text)
        above = [node for node in above if node[0] < indent]
        while _KEY in text:
            name, _, text = text.partition(_KEY)[2].partition('":')
            above.append((indent, name))
        text = text.rpartition("callable class: ")[2].strip()
        lines.setdefault(".".join(name for _, name in above), []).append(text)
    option = max(lines, key=lambda name: name.count("."))
    return option, lines[option]


def _reasons(lines: Iterable[str]) -> list[str]:
    """What is wrong, in the words of jsonargparse, one reason for each type."""
    leaves = [line.partition(". Got value: ")[0].strip(" -.") for line in lines]
    return list(dict.fromkeys(leaf for leaf in leaves if leaf and not leaf.startswith(_ASIDE)))


def _no_option_of(cls: type, option: str, stray: str) -> str:
    """The sentence about an option that the class of `option` does not have."""
    known = list(options_parser(cls).get_defaults().keys())
    inner, _, name = stray.rpartition(".")
    if any(other.startswith(f"{inner}.") for other in known) or did_you_mean(name, known):
        return _no_option(f"{option}.{stray}", [f"{option}.{other}" for other in known])
    classes = {other: find_class(option, other) for other in choices(option)}
    others = [other for other, of in classes.items() if of and stray in inspect.signature(of).parameters]
    listed = list(dict.fromkeys(other.partition(".")[0] for other in known))
    has = f"has: {', '.join(listed)}" if listed else "has no options"
    hint = f" `{stray}` is an option of {', '.join(others)}." if others else known_as(stray)
    return f"There is no option `{option}.{stray}`. {cls.__name__} of `{option}` {has}.{hint}"


def _no_option(option: str, known: Sequence[str]) -> str:
    """The sentence about an option that does not exist."""
    group, _, name = option.rpartition(".")
    elsewhere = [other for other in known if other.endswith(f".{name}")]
    within = f"{group}." if group else ""
    parts = (other.removeprefix(within).partition(".")[0] for other in known if other.startswith(within))
    siblings = list(dict.fromkeys(parts))
    hint = f" Did you mean `{elsewhere[0]}`?" if elsewhere else known_as(option) or did_you_mean(name, siblings)
    if not hint:
        hint = f" `{group}` has: {', '.join(siblings)}." if group and siblings else " See `grail-lightning fit --help`."
    return f"There is no option `{option}`.{hint}"


def _owner(message: str, line: str) -> str:
    """The import path of the class of which a line of a message says that it has no such option."""
    before, _, after = message.partition(line)
    made_of = f"{line}{after}".partition("\n")[0]  # A class that is called later stands behind the reason.
    return (made_of if "class_path" in made_of else before).rpartition("class_path")[2].split("'")[1]
