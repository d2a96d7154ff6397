"""`python -m grail_lightning.report RUN…`: figures with intervals, and paired differences (see `evaluate.command`)."""

import sys

from grail_lightning.evaluate.command import report

if __name__ == "__main__":
    sys.exit(report())
