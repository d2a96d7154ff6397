"""``python -m grail_lightning.sweep FILE``: methods × tasks × seeds, each a `grail-lightning fit` in its own folder."""

from grail_lightning.app.sweep import main

if __name__ == "__main__":
    main()
