"""``python -m grail_lightning.plan``: the memory of a training run, before a machine is rented."""

from grail_lightning.app.plan import main

if __name__ == "__main__":
    main()
