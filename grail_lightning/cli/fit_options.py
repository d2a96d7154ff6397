"""The options of a fit, parsed and checked as for a run, of which nothing is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from jsonargparse import Namespace

from grail_lightning.cli.app import GrailCLI, run
from grail_lightning.cli.config_files import expand_configs
from grail_lightning.cli.methods import expand_methods


class _Options(GrailCLI):
    """Parses the options and builds nothing."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        return

    def _run_subcommand(self, subcommand: str) -> None:
        return


class ParsedFit:
    """The options that a command line of ``fit`` and its config files give.

    Attributes:
        options: The options.
    """

    def __init__(self, cli: GrailCLI) -> None:
        self._cli, self._config = cli, cli.config
        self.options: Namespace = cli.config.fit

    def build(self) -> None:
        """Build the objects of the options, all but the Trainer; no weights are loaded.

        Raises:
            ValueError: If a value is refused by the class that it is for.
        """
        self._cli.parser.instantiate_classes(self._config)

    def saved(self) -> dict[str, Any]:
        """The options as a run saves them in its ``config.yaml``."""
        return dict(yaml.safe_load(self._cli._parser("fit").dump(self.options, skip_none=False)))


class FitOptions:
    """Parses command lines of ``fit`` one after the other. The parser, which takes a second to make, is made once."""

    def __init__(self) -> None:
        self._cli: GrailCLI | None = None

    def parse(self, arguments: Sequence[str]) -> ParsedFit:
        """The options that a command line of ``fit`` and its config files give.

        Raises:
            ValueError: If an option is wrong.
        """
        given, cli = ["fit", *arguments], self._cli
        if cli is None:
            with _command_line(given):
                cli = self._cli = run(_Options, None)
        else:
            with _command_line(expand_methods(expand_configs(given))):
                cli.parse_arguments(cli.parser, None)
            cli.before_instantiate_classes()
        return ParsedFit(cli)


def fit_options(arguments: list[str]) -> Namespace:
    """The options that a command line of ``fit`` and its config files give.

    Raises:
        ValueError: If an option is wrong.
    """
    return FitOptions().parse(arguments).options


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """A context in which these are the arguments of the process, which messages about options refer to."""
    given, sys.argv[1:] = sys.argv[1:], list(arguments)
    try:
        yield
    finally:
        sys.argv[1:] = given
