"""`python -m grail_lightning.sweep`: grids of runs (see `command`)."""

import sys

from grail_lightning.sweep.command import main

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Before the first run: no child is to be ended.
        sys.exit(130)
