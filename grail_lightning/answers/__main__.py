"""`python -m grail_lightning.answers`: grade by hand (see `service.program`)."""

import sys

from grail_lightning.answers.service.program import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
