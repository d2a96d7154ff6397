"""`python -m grail_lightning.sweep`: grids of runs (see `command`)."""

from grail_lightning.sweep.command import main

if __name__ == "__main__":
    main()
