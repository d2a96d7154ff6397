"""``python -m grail_lightning.regrade RUN``: kept samples graded again, without sampling."""

from grail_lightning.app.regrade import main

if __name__ == "__main__":
    main()
