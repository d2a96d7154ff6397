"""The options of a fit, parsed and checked as for a run, of which nothing is built."""

from __future__ import annotations

import sys

from jsonargparse import Namespace

from grail_lightning.cli.app import GrailCLI, run


class _Options(GrailCLI):
    """Parses the options and builds nothing."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        return

    def _run_subcommand(self, subcommand: str) -> None:
        return


def fit_options(arguments: list[str]) -> Namespace:
    """The options that a command line of ``fit`` and its config files give.

    Raises:
        ValueError: If an option is wrong.
    """
    given, sys.argv[1:] = sys.argv[1:], ["fit", *arguments]
    try:
        found: Namespace = run(_Options, None).config.fit
        return found
    finally:
        sys.argv[1:] = given
