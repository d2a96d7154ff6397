"""``python -m grail_lightning.benchmark METHOD``: how good a credit method is, where the right credit is known."""

from grail_lightning.app.benchmark.main import main

if __name__ == "__main__":
    main()
