"""``python -m grail_lightning`` is ``grail-lightning``."""

from grail_lightning.cli import main

if __name__ == "__main__":
    main()
