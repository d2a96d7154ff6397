"""The pages of ``--help GROUP``: a group of options, an option and the classes that it accepts, or all options."""

from __future__ import annotations

import argparse
import difflib
import inspect
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from jsonargparse import ArgumentParser

from grail_lightning.callbacks.choices import choices, class_of
from grail_lightning.cli.help_pages import ALL, GROUPS, PURPOSE, asked, show, usage

# Where the text of a library does not fit: an option has another meaning here, or its text is no sentence.
TEXTS = {
    "seed_everything": "The seed of all random numbers. true takes a random one.",
    "ckpt_path": "The checkpoint to begin with: `last` or `best` of the run's folder, or a file. With it, `fit` "
    "resumes a run.",
    "data": "The data module, a class with its options, as in `--data=MathData --data.train=problems.jsonl`.",
    "checkpoint.dirpath": "The folder of the checkpoints; default `checkpoints` in the folder of the run.",
    "checkpoint.filename": "The name of the file, without its ending. `{epoch}`, `{step}` and the names of metrics in "
    "braces stand for their values.",
    "checkpoint.monitor": "The metric by which checkpoints are compared.",
    "checkpoint.mode": "Whether the largest (`max`) or the smallest (`min`) value of the metric is the best.",
    "checkpoint.verbose": "Whether each save is reported.",
    "checkpoint.save_top_k": "The number of best checkpoints that are kept; 0 is none, -1 is all. Several need a "
    "`filename` with `{step}`.",
    "checkpoint.auto_insert_metric_name": "Whether the names of metrics stand before their values in the name of the "
    "file.",
}
REST = "The checkpoint to begin with, and how it is read"


def describe(parser: ArgumentParser, subcommand: str) -> None:
    """Give the groups and options of a subcommand whole sentences where a library's docstring is cut or differs.

    jsonargparse titles a group with the first line of the docstring of its class, and the docstrings of Lightning go on
    in the next one.

    Args:
        parser: The parser of the subcommand, with all its options.
        subcommand: The name of the subcommand.
    """
    parser.description = PURPOSE[subcommand]
    parser.usage = usage(subcommand).removeprefix("usage: ")
    for name, group in (parser.groups or {}).items():
        if name in GROUPS:
            group.title = GROUPS[name].removesuffix(".")  # argparse adds a colon.
        elif name == subcommand:
            group.title = REST
    for action in parser._actions:
        action.help = TEXTS.get(action.dest, action.help)


def print_options(parsers: Mapping[str, ArgumentParser], arguments: Sequence[str]) -> None:
    """Print the page that a command line asks for, and end with exit code 0. Does nothing if it asks for none.

    Args:
        parsers: The parser of each subcommand.
        arguments: The arguments of the command line.

    Raises:
        ValueError: If there is no such group or option.
    """
    wanted = asked(arguments)
    if wanted is not None and all(wanted):
        subcommand, name = wanted
        show(options_page(parsers[subcommand], name).rstrip("\n"))
        raise SystemExit(0)


def options_page(parser: ArgumentParser, name: str) -> str:
    """The options of a group in full, or one option with the classes that it accepts. The parser is used up.

    Args:
        parser: The parser of a subcommand.
        name: The dotted name of a group or an option, or `all`.

    Raises:
        ValueError: If there is no such group or option.
    """
    if name == ALL:
        return str(parser.format_help())
    name = name.removeprefix("--")
    shown = [action for action in parser._actions if f"{action.dest}.".startswith(f"{name}.")]
    if not shown:
        raise ValueError(_no_such(parser, name))
    for action in parser._actions:
        if action not in shown:
            action.help = argparse.SUPPRESS  # argparse leaves out such an option, and a group without others.
    if name not in (parser.groups or {}):  # An option, whose group has a title about all of its options.
        for group in (parser.groups or {}).values():
            group.title = GROUPS.get(name, "Option").removesuffix(".")
    parser.description = None
    return f"{parser.format_help()}{_classes(name)}"


def _classes(option: str) -> str:
    """The classes that an option accepts, each with the first sentence of its docstring."""
    names = choices(option)
    if not names:
        return ""
    width = max(len(name) for name in names)
    first = {name: (inspect.getdoc(class_of(option, name)) or "").partition("\n")[0] for name in names}
    wide, indent = shutil.get_terminal_size().columns - 2, " " * (width + 4)  # As wide as argparse's own text.
    rows = [
        textwrap.fill(
            line if line.endswith(".") else "", wide, initial_indent=f"  {name:<{width}}  ", subsequent_indent=indent
        )
        or f"  {name}"
        for name, line in first.items()
    ]
    return "\n".join(["", f"Classes, of which `--{option}.help CLASS` lists the options:", *rows, ""])


def _no_such(parser: ArgumentParser, name: str) -> str:
    """The sentence about a name that is neither a group nor an option of the parser."""
    said = f"`--help` must be followed by a group of options, an option or `{ALL}`, but got {name!r}."
    above = name
    while above := above.rpartition(".")[0]:
        if (names := choices(above)) and any(action.dest == above for action in parser._actions):
            return f"{said} `--{above}.help CLASS` lists the options of a class, one of {', '.join(names)}."
    known = [*GROUPS, *(action.dest for action in parser._actions if not action.dest.endswith(".help"))]
    last = {option.rpartition(".")[2]: option for option in reversed(known)}
    near = [last[name]] if name in last else difflib.get_close_matches(name, dict.fromkeys((ALL, *known)), n=2)
    near = near or [last[part] for part in difflib.get_close_matches(name.rpartition(".")[2], last, n=1)]
    if near:
        return f"{said} Did you mean {' or '.join(f'`{other}`' for other in near)}?"
    return f"{said} The groups are {', '.join(GROUPS)}."
