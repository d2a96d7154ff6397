"""The command ``grail-lightning``, also as ``python -m grail_lightning``."""

import sys

from grail_lightning._version import __version__
from grail_lightning.cli.help import asked, check_subcommand, first_screen, refuse, show


def main() -> None:
    """Entry point. What can be answered without torch, which takes seconds to import, is answered at once."""
    if sys.argv[1:] == ["--version"]:
        print(f"grail-lightning {__version__}")
        return
    if asked(sys.argv[1:]) == "":
        show(first_screen())
        return
    try:
        check_subcommand(sys.argv[1:])
    except ValueError as error:
        refuse(str(error))
    from grail_lightning.cli import main as run

    run()


if __name__ == "__main__":
    main()
