"""The command ``grail-lightning``, also as ``python -m grail_lightning``."""

import sys

from grail_lightning.app.cli.help import answer


def main() -> None:
    """Entry point. What can be answered without torch, which takes seconds to import, is answered at once."""
    answer(sys.argv[1:])
    from grail_lightning.app.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
