"""Several credit methods on one command line: ``predict --model.credit=GRAIL --model.credit=OARGradient``."""

from __future__ import annotations

from collections.abc import Sequence

from grail_lightning.cli.commands import SUBCOMMANDS

CREDIT, COMPARED = "--model.credit", "--predictions.compare"


def expand_methods(arguments: Sequence[str]) -> list[str]:
    """The arguments, with every method after the first one as an entry of `predictions.compare`.

    Options of a method follow its name: ``--model.credit=GRAIL --model.credit.std=0.3 --model.credit=HighEntropy``.

    Raises:
        ValueError: If several methods are given to a subcommand other than `predict`.
    """
    given = [_value(arguments, index) for index, argument in enumerate(arguments) if _names_method(argument)]
    if len(given) < 2:
        return list(arguments)
    command = next((argument for argument in arguments[:1] if argument in SUBCOMMANDS), None)
    if command != "predict":
        raise ValueError(
            f"`model.credit` must be given once to `{command or 'grail-lightning'}`, but got {' and '.join(given)}. "
            "Leave all but one out; `grail-lightning predict` compares several."
        )
    expanded, number = [], 0
    for argument in arguments:
        if _names_method(argument):
            number += 1
            argument = argument if number == 1 else f"{COMPARED}+{argument[len(CREDIT) :]}"
        elif number > 1 and argument.startswith(f"{CREDIT}."):
            argument = COMPARED + argument[len(CREDIT) :]
        expanded.append(argument)
    return expanded


def as_given(message: str, arguments: Sequence[str]) -> str:
    """A message about an option, by the name under which the command line gave it.

    Args:
        message: The message.
        arguments: The arguments as `expand_methods` returns them.
    """
    expanded = any(argument.partition("=")[0] == f"{COMPARED}+" for argument in arguments)
    return message.replace(COMPARED[2:], CREDIT[2:]) if expanded else message


def _names_method(argument: str) -> bool:
    return argument.partition("=")[0] == CREDIT


def _value(arguments: Sequence[str], index: int) -> str:
    _, separator, value = arguments[index].partition("=")
    return value if separator else next(iter(arguments[index + 1 : index + 2]), "")
