"""`python -m grail_lightning.report RUN…`: figures with intervals, and paired differences (see `command`)."""

import sys

from grail_lightning.report.command import main

if __name__ == "__main__":
    sys.exit(main())
