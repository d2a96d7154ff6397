"""``python -m grail_lightning.plan``: whether a run fits, before a machine is rented, and what to set if not."""

from grail_lightning.app.plan.main import main

if __name__ == "__main__":
    main()
