"""`python -m grail_lightning.plan`: what a run will need (see `command`)."""

from grail_lightning.plan.command import main

if __name__ == "__main__":
    main()
